"""Credentials for the API server: from a kubeconfig, or from the pod's service account."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kubernetes.aio import client, config

from sglang_rollout.kube.errors import NoCredentials

_SERVICE_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_POD_NAMESPACE = _SERVICE_TOKEN.with_name("namespace")


@dataclass(frozen=True)
class Credentials:
    """Address of the API server, and the identity of this client. The fields have the names of ``kopf.ConnectionInfo``."""

    server: str
    ca_path: str | None
    insecure: bool
    token: str | None
    scheme: str | None
    certificate_path: str | None
    private_key_path: str | None
    proxy_url: str | None = None


async def read_credentials(kubeconfig: str | None) -> Credentials:
    """Return the current credentials for the HTTP client of another library.

    Raises:
        NoCredentials: There are no usable credentials.
    """
    found = await load_configuration(kubeconfig)
    scheme, _, token = str(found.api_key.get("BearerToken", "")).partition(" ")
    return Credentials(
        server=found.host,
        ca_path=found.ssl_ca_cert,
        insecure=not found.verify_ssl,
        token=token or None,
        scheme=scheme.capitalize() if token else None,
        certificate_path=found.cert_file,
        private_key_path=found.key_file,
        proxy_url=found.proxy or None,
    )


async def load_configuration(kubeconfig: str | None) -> client.Configuration:
    """Return the credentials of ``kubeconfig``, else of the pod's service account, else of $KUBECONFIG, else of ~/.kube/config.

    Raises:
        NoCredentials: There are no usable credentials.
    """
    found = client.Configuration()
    # Python 3.13 and newer demand extensions that the certificates of many clusters lack. Other Kubernetes clients do not.
    found.disable_strict_ssl_verification = True
    try:
        path = _find_kubeconfig(kubeconfig)
        if path is None:
            config.load_incluster_config(client_configuration=found)
        else:
            await config.load_kube_config(config_file=path, client_configuration=found, persist_config=False)
    except (config.ConfigException, OSError, ValueError, TypeError) as error:
        raise NoCredentials(f"the Kubernetes credentials cannot be used: {error}") from error
    return found


def find_namespace(kubeconfig: str | None) -> str:
    """Return the namespace that kubectl would use: of the kubeconfig's context, or of the pod; else ``default``.

    Raises:
        NoCredentials: There are no usable credentials.
    """
    try:
        path = _find_kubeconfig(kubeconfig)
        if path is None:
            return _POD_NAMESPACE.read_text().strip()
        _, current = config.list_kube_config_contexts(path)
    except (config.ConfigException, OSError, ValueError, TypeError) as error:
        raise NoCredentials(f"the Kubernetes credentials cannot be used: {error}") from error
    return str((current or {}).get("context", {}).get("namespace") or "default")


def _find_kubeconfig(explicit: str | None) -> str | None:
    """Return the path of the kubeconfig; None for the pod's service account."""
    if explicit is None and _SERVICE_TOKEN.exists() and os.environ.get("KUBERNETES_SERVICE_HOST"):
        return None
    path = explicit or os.environ.get("KUBECONFIG") or "~/.kube/config"
    if not any(Path(part).expanduser().exists() for part in path.split(os.pathsep) if part):
        raise NoCredentials(f"no kubeconfig at {path}, and not in a cluster: name one with --kubeconfig or KUBECONFIG")
    return path
