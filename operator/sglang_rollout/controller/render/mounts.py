"""What the engine sees on volumes of the user, the agent sees too, read-only: it checks checkpoints before the engine loads them.

The agent also gets the variables that say where the engine's Hugging Face cache is: a checkpoint is compared with the model there.
"""

from __future__ import annotations

from typing import Any

from sglang_rollout.api.model_spec import OWN_FOLDERS
from sglang_rollout.api.pod_template import AGENT_CONTAINER, ENGINE_CONTAINER, MODEL_VOLUME, RESERVED_VOLUMES
from sglang_rollout.controller.render.common import Object

_NOT_SHARED = frozenset(RESERVED_VOLUMES) - {MODEL_VOLUME}

HUB_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")
"""Variables by which huggingface_hub finds its cache."""

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
    caches = [variable for variable in engine.get("env") or [] if _is_cache(variable)]
    made = [
        _mounting(container, shared, caches) if container["name"] == AGENT_CONTAINER else container
        for container in spec.get("initContainers") or []
    ]
    return {**template, "spec": {**spec, "initContainers": made}}


def _mounting(agent: Object, shared: list[Object], caches: list[Object]) -> Object:
    named = {variable["name"] for variable in caches}
    env = [*(variable for variable in agent.get("env") or [] if variable["name"] not in named), *caches]
    return {**agent, "env": env, "volumeMounts": [*agent["volumeMounts"], *shared]}


def _is_cache(variable: Object) -> bool:
    """Whether the agent can take it over: a value that refers to another variable of the engine means nothing there."""
    return variable.get("name") in HUB_VARIABLES and isinstance(variable.get("value"), str) and "$(" not in variable["value"]


def _is_shared(mount: dict[str, Any]) -> bool:
    path = str(mount.get("mountPath", "")).rstrip("/")
    hides = not path or any(path == own or path.startswith(f"{own}/") for own in OWN_FOLDERS)
    return mount.get("name") not in _NOT_SHARED and "subPathExpr" not in mount and not hides
