"""What the engine sees on volumes of the user, the agent sees too, read-only: it checks checkpoints before the engine loads them."""

from __future__ import annotations

from typing import Any

from sglang_rollout.api.model_spec import OWN_FOLDERS
from sglang_rollout.api.pod_template import AGENT_CONTAINER, ENGINE_CONTAINER, MODEL_VOLUME, RESERVED_VOLUMES
from sglang_rollout.core.render.common import Object

_NOT_SHARED = frozenset(RESERVED_VOLUMES) - {MODEL_VOLUME}

_KEPT = ("name", "mountPath", "subPath")
"""Not ``mountPropagation``, which is for writers, and not ``subPathExpr``, which needs variables that only the engine has."""


def with_shared_mounts(template: Object) -> Object:
    """Return the pod template with the engine's mounts of user volumes in the agent's container as well."""
    spec = template["spec"]
    engine = next(container for container in spec["containers"] if container["name"] == ENGINE_CONTAINER)
    shared = [
        {**{key: mount[key] for key in _KEPT if key in mount}, "readOnly": True}
        for mount in engine.get("volumeMounts") or []
        if _is_shared(mount)
    ]
    if not shared:
        return template
    made = [
        _mounting(container, shared) if container["name"] == AGENT_CONTAINER else container
        for container in spec.get("initContainers") or []
    ]
    return {**template, "spec": {**spec, "initContainers": made}}


def _mounting(agent: Object, shared: list[Object]) -> Object:
    return {**agent, "volumeMounts": [*agent["volumeMounts"], *shared]}


def _is_shared(mount: dict[str, Any]) -> bool:
    path = str(mount.get("mountPath", "")).rstrip("/")
    hides = not path or any(path == own or path.startswith(f"{own}/") for own in OWN_FOLDERS)
    return mount.get("name") not in _NOT_SHARED and "subPathExpr" not in mount and not hides
