"""What all renderers share: the operator's settings, parts of objects, and quantities."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from sglang_rollout.api import v1alpha1 as api
from sglang_rollout.api.engine_spec import Resources
from sglang_rollout.controller.render import names

Object = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """Settings of the operator that change the rendered objects."""

    coordinator_image: str
    """Image of agent and coordinator."""
    router_image: str
    """Image of gate, front and smg."""
    image_pull_policy: str = "IfNotPresent"
    """Pull policy of both images."""


SIDECAR_UID = 65532
"""User of the operator's own containers. It is the same for all, because only its owner may use the gate's socket."""

INIT = ("tini", "--")
"""Prefix of the operator's own commands, because Python, haproxy and smg ignore SIGTERM during their first second."""

TMP_VOLUME: Object = {"name": "tmp", "emptyDir": {"sizeLimit": "256Mi"}}
TMP_MOUNT: Object = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108 - a volume of the pod, not a shared folder
COORDINATOR_MOUNT: Object = {"name": "rollout-coordinator", "mountPath": names.COORDINATOR_DIR}
CONTROL_MOUNT: Object = {"name": "control", "mountPath": names.CONTROL_DIR, "readOnly": True}
HOME_ENV: Object = {"name": "HOME", "value": "/tmp"}  # noqa: S108 - the only writable folder; libraries look for a home


def child(rollout: api.SGLangRollout, api_version: str, kind: str, name: str, component: str, *, engine: str | None = None) -> Object:
    """Return a child object without content: labels, and the owner reference that deletes it with its rollout."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": rollout.namespace,
            "labels": names.labels(rollout.name, component, engine),
            "ownerReferences": [
                {
                    "apiVersion": api.API_VERSION,
                    "kind": api.KIND,
                    "name": rollout.name,
                    "uid": rollout.metadata.uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
    }


def own_container(
    name: str, image: str, settings: Settings, *, command: Sequence[str], args: Sequence[str], mounts: Sequence[Object], **fields: Any
) -> Object:
    """Return a container of the operator, which runs ``sglang-rollout`` with the words of ``command``."""
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": [*INIT, "sglang-rollout", *command],
        "args": list(args),
        "env": [HOME_ENV],
        **fields,
        "securityContext": restricted(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": list(mounts),
    }


def restricted() -> Object:
    """Return a security context of the Pod Security level "restricted", with a read-only root."""
    return {
        "runAsNonRoot": True,
        "runAsUser": SIDECAR_UID,
        "runAsGroup": SIDECAR_UID,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def unprivileged(*capabilities: str) -> Object:
    """Return a security context for the user's image, which may need root: only the named capabilities.

    Without NET_RAW the container cannot read the credentials of calls to other containers of its pod.
    """
    added = {"add": list(capabilities)} if capabilities else {}
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], **added}}


def http_probe(path: str, port: int, **timing: int) -> Object:
    """Return a probe that gets ``path`` from ``port``."""
    return {"httpGet": {"path": path, "port": port}, **timing}


def container_ports(*, on_node: bool = False, **named: int) -> list[Object]:
    """Return the ports of a container; ``on_node`` makes the scheduler keep pods with equal ports on different nodes."""
    ports = [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in named.items()]
    return [{**port, "hostPort": port["containerPort"]} for port in ports] if on_node else ports


def container_resources(resources: Resources) -> Object:
    """Return the user's resources as fields of a container."""
    parts = {"requests": resources.requests, "limits": resources.limits}
    return {part: {name: str(value) for name, value in values.items()} for part, values in parts.items() if values}


def memory_volume(name: str) -> Object:
    """Return a small volume in memory."""
    return {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}}


def control_volume(secret: str, key: str = names.TOKEN_KEY) -> Object:
    """Return the volume with one value of a Secret. All users of a container may read it; only own containers mount it."""
    items = [{"key": key, "path": names.TOKEN_KEY}]
    return {"name": "control", "secret": {"secretName": secret, "items": items, "defaultMode": 0o444}}


_QUANTITY = re.compile(r"([+-]?\d+(?:\.\d*)?|\.\d+)(?:([eE][+-]?\d+)|([KMGTPE]i|[numkMGTPE])?)")
_EXPONENTS = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_FACTORS = {suffix: Decimal(10) ** exponent for suffix, exponent in _EXPONENTS.items()} | {
    f"{prefix}i": Decimal(1024) ** power for power, prefix in enumerate("KMGTPE", 1)
}


def parse_quantity(value: Any) -> Decimal | None:
    """Return the number that a Kubernetes quantity stands for, ``1000m`` for 1; None if the value is no quantity."""
    found = _QUANTITY.fullmatch(str(value).strip()) if isinstance(value, str | int | float) else None
    if found is None:
        return None
    number, exponent, suffix = found.groups()
    return Decimal(number + (exponent or "")) * _FACTORS[suffix or ""]
