"""What all renderers share: the operator's settings, parts of objects, and quantities."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from sglang_rollout.api import v1alpha1 as api
from sglang_rollout.api.engine_spec import Resources
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.names import EnginePorts

Object = dict[str, Any]

SIDECAR_UID = 65532
"""User of all our own containers. One and the same, because the gate's socket is readable by its owner only and the
agent must use it."""

INIT = ("tini", "--")
"""Before every program of ours: Python, haproxy and smg listen to no signal in their first second, and until then nothing ends a
container's first process. A pod that is deleted while it starts would linger for its whole grace."""

TMP_VOLUME: Object = {"name": "tmp", "emptyDir": {"sizeLimit": "256Mi"}}
TMP_MOUNT: Object = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108 - a volume of the pod, not a shared folder
CONTROL_MOUNT: Object = {"name": "control", "mountPath": names.CONTROL_DIR, "readOnly": True}
HOME_ENV: Object = {"name": "HOME", "value": "/tmp"}  # noqa: S108 - the only writable folder; libraries look for a home


def child(rollout: api.SGLangRollout, *, api_version: str, kind: str, name: str, component: str, engine: str | None = None) -> Object:
    """Return the head of a child object: labels, and the owner reference by which it is deleted with its
    SGLangRollout."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": rollout.namespace,
            "labels": names.labels(rollout.name, component, engine),
            "ownerReferences": [owner_reference(rollout)],
        },
    }


def owner_reference(rollout: api.SGLangRollout) -> Object:
    """Return the reference to ``rollout`` as the controller of a child."""
    return {
        "apiVersion": api.API_VERSION,
        "kind": api.KIND,
        "name": rollout.name,
        "uid": rollout.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def restricted() -> Object:
    """Return the security context of our own containers: what the Pod Security level "restricted" asks, and a read-only
    root."""
    return {
        "runAsNonRoot": True,
        "runAsUser": SIDECAR_UID,
        "runAsGroup": SIDECAR_UID,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def http_probe(path: str, port: int, **timing: int) -> Object:
    """Return a probe that asks ``path`` on ``port``."""
    return {"httpGet": {"path": path, "port": port}, **timing}


def tcp_probe(port: int, **timing: int) -> Object:
    """Return a probe that connects to ``port``."""
    return {"tcpSocket": {"port": port}, **timing}


def container_ports(ports: EnginePorts, **named: int) -> list[Object]:
    """Return the ports of a container. With ``hostPort``, by which the scheduler keeps two engines that need the same ones on different
    nodes, if they are ports of the node."""
    made = [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in named.items()]
    return [{**port, "hostPort": port["containerPort"]} for port in made] if ports.on_node else made


def requests(cpu: str, memory: str) -> Object:
    """Return resources without limits: a limit on a helper turns a short spike into an outage."""
    return {"requests": {"cpu": cpu, "memory": memory}}


def container_resources(resources: Resources) -> Object:
    """Return the user's resources as a container has them."""
    made = {}
    for part, values in (("requests", resources.requests), ("limits", resources.limits)):
        if values:
            made[part] = {name: str(value) for name, value in values.items()}
    return made


def control_volume(rollout: api.SGLangRollout) -> Object:
    """Return the volume with the control token. World-readable inside the pod: it is mounted into our own container
    only."""
    return {"name": "control", "secret": {"secretName": names.control_name(rollout.name), "defaultMode": 0o444}}


@dataclass(frozen=True)
class Settings:
    """Settings of the operator that shape what it renders."""

    coordinator_image: str
    """Image with ``sglang-rollout``: agent and coordinator."""
    router_image: str
    """Image with haproxy, smg and ``sglang-rollout``: gate, front and smg."""
    image_pull_policy: str = "IfNotPresent"
    """Pull policy of these two images."""
    version: str = "dev"
    """Release of the operator; for labels and logs, never hashed into a revision."""


_QUANTITY = re.compile(r"^([+-]?\d+(?:\.\d*)?|\.\d+)(?:([eE][+-]?\d+)|(Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E)?)$")
_FACTORS = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "k": Decimal(10) ** 3,
    "M": Decimal(10) ** 6,
    "G": Decimal(10) ** 9,
    "T": Decimal(10) ** 12,
    "P": Decimal(10) ** 15,
    "E": Decimal(10) ** 18,
    "Ki": Decimal(2) ** 10,
    "Mi": Decimal(2) ** 20,
    "Gi": Decimal(2) ** 30,
    "Ti": Decimal(2) ** 40,
    "Pi": Decimal(2) ** 50,
    "Ei": Decimal(2) ** 60,
}


def parse_quantity(value: Any) -> Decimal | None:
    """Return the number that a quantity stands for; None if it is no quantity."""
    found = _QUANTITY.match(str(value).strip()) if isinstance(value, str | int | float) else None
    if not found:
        return None
    number, exponent, suffix = found.groups()
    return Decimal(number + (exponent or "")) * _FACTORS.get(suffix or "", Decimal(1))


def is_same_quantity(one: Any, other: Any) -> bool:
    """Return whether two values are the same quantity."""
    left, right = parse_quantity(one), parse_quantity(other)
    return left is not None and left == right
