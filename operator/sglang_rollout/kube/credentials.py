"""Who we are to the API server: a kubeconfig, or the pod's service account."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kubernetes.aio import client, config

from sglang_rollout.kube.errors import NoCredentials

SERVICE_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


@dataclass(frozen=True)
class Credentials:
    """Where the API server is and who we are there."""

    server: str
    ca_path: str | None
    insecure: bool
    token: str | None
    scheme: str | None
    certificate_path: str | None
    private_key_path: str | None
    proxy: str | None = None


async def log_in(kubeconfig: str | None) -> Credentials:
    """Find credentials anew, for an HTTP client that is not this library's."""
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
        proxy=found.proxy or None,
    )


async def load_configuration(kubeconfig: str | None) -> client.Configuration:
    """Credentials in this order: an explicit kubeconfig, the pod's service account, KUBECONFIG, ~/.kube/config."""
    found = client.Configuration()
    try:
        path = _kubeconfig_path(kubeconfig)
        if path is None:
            config.load_incluster_config(client_configuration=found)
        else:
            await config.load_kube_config(config_file=path, client_configuration=found, persist_config=False)
    except (config.ConfigException, OSError, ValueError, TypeError) as error:
        raise NoCredentials(f"the Kubernetes credentials cannot be used: {error}") from error
    return found


def _kubeconfig_path(explicit: str | None) -> str | None:
    """The kubeconfig to read; None means the pod's service account."""
    if explicit is None and SERVICE_TOKEN.exists() and os.environ.get("KUBERNETES_SERVICE_HOST"):
        return None
    path = explicit or os.environ.get("KUBECONFIG") or "~/.kube/config"
    if not any(Path(part).expanduser().exists() for part in path.split(os.pathsep) if part):
        raise NoCredentials(f"no kubeconfig at {path}, and not in a cluster: name one with --kubeconfig or KUBECONFIG")
    return path
