"""What the pods of a rollout need for HTTPS at the fleet's URL (``security.tls``). Pure.

The Secret has the format of cert-manager. Only the front mounts the private key. Agents that call the fleet's URL mount the certificate
of the authority.
"""

from __future__ import annotations

from sglang_rollout.api.sharing_spec import Mode
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.common import Object, memory_volume

CERTIFICATE_KEY, PRIVATE_KEY, AUTHORITY_KEY = "tls.crt", "tls.key", "ca.crt"
"""Keys of the Secret."""
CERTIFICATE_FILE = "/etc/sglang-rollout/tls/front.pem"
"""The certificate with its chain. haproxy finds the private key in the file of the same name with the suffix ``.key``."""
AUTHORITY_FILE = "/etc/sglang-rollout/authority/ca.crt"
FRONT_DIR = "/run/rollout-front"
"""Folder in memory of the front alone: haproxy's configuration, and the socket through which the front renews its certificate."""

_CERTIFICATE = "rollout-tls"
_AUTHORITY = "rollout-authority"
_FRONT = "rollout-front"


def is_encrypted(rollout: SGLangRollout) -> bool:
    """Return True if the fleet's URL is HTTPS."""
    return rollout.spec.security.tls is not None


def calls_fleet(rollout: SGLangRollout) -> bool:
    """Return True if agents call the fleet's URL: they forward the calls of a co-located trainer."""
    return rollout.spec.mode is not Mode.STANDALONE


def front_volumes(rollout: SGLangRollout) -> list[Object]:
    """Return the volumes of the front. A new router pod waits until the Secret exists."""
    if not is_encrypted(rollout):
        return []
    file = CERTIFICATE_FILE.rpartition("/")[2]
    return [memory_volume(_FRONT), _secret_volume(rollout, _CERTIFICATE, {CERTIFICATE_KEY: file, PRIVATE_KEY: f"{file}.key"})]


def front_mounts(rollout: SGLangRollout) -> list[Object]:
    """Return the mounts of the front."""
    if not is_encrypted(rollout):
        return []
    return [{"name": _FRONT, "mountPath": FRONT_DIR}, _mount(_CERTIFICATE, CERTIFICATE_FILE)]


def front_arguments(rollout: SGLangRollout) -> list[str]:
    """Return the arguments of the front about its files. Without TLS it has no file that another container must not read."""
    if not is_encrypted(rollout):
        return ["--runtime-dir", "/tmp/front"]  # noqa: S108 - a volume of the pod
    return ["--runtime-dir", FRONT_DIR, "--certificate", CERTIFICATE_FILE]


def agent_volumes(rollout: SGLangRollout) -> list[Object]:
    """Return the volume of an agent that calls the fleet's URL. It is empty if the Secret has no certificate of an authority."""
    if not is_encrypted(rollout) or not calls_fleet(rollout):
        return []
    return [_secret_volume(rollout, _AUTHORITY, {AUTHORITY_KEY: AUTHORITY_FILE.rpartition("/")[2]}, optional=True)]


def agent_mounts(rollout: SGLangRollout) -> list[Object]:
    """Return the mount of an agent that calls the fleet's URL."""
    return [_mount(_AUTHORITY, AUTHORITY_FILE)] if agent_volumes(rollout) else []


def agent_arguments(rollout: SGLangRollout) -> list[str]:
    """Return the arguments of an agent about the fleet's URL."""
    if not calls_fleet(rollout):
        return []
    url = names.public_url(rollout.name, rollout.namespace, tls=is_encrypted(rollout))
    return ["--fleet-url", url, *(["--fleet-ca", AUTHORITY_FILE] if is_encrypted(rollout) else [])]


def find_secret(router: Object) -> str | None:
    """Return the name of the Secret with which a live Deployment of the router serves HTTPS; None: it serves HTTP."""
    volumes: list[Object] = router["spec"]["template"]["spec"].get("volumes") or []
    return next((volume["secret"]["secretName"] for volume in volumes if volume["name"] == _CERTIFICATE and "secret" in volume), None)


def _secret_volume(rollout: SGLangRollout, name: str, files: dict[str, str], *, optional: bool = False) -> Object:
    tls = rollout.spec.security.tls
    if tls is None:
        raise ValueError("the rollout has no security.tls")
    items = [{"key": key, "path": path} for key, path in files.items()]
    source: Object = {"secretName": tls.secret_name, "items": items, "defaultMode": 0o444}
    return {"name": name, "secret": {**source, "optional": True} if optional else source}


def _mount(volume: str, file: str) -> Object:
    return {"name": volume, "mountPath": file.rpartition("/")[0], "readOnly": True}
