"""Volumes of an engine pod for model files and compiled kernels, and the container that downloads a model.

The agent gets the engine's mounts of user volumes, read-only, because it checks checkpoints before the engine loads them.
It also gets the variables that locate the engine's Hugging Face cache, because it compares a checkpoint with the model there.
"""

from __future__ import annotations

from typing import Any

from sglang_rollout.api.model_spec import MODEL_PATH_ENV, MODELS, OWN_FOLDERS
from sglang_rollout.api.pod_template import (
    AGENT_CONTAINER,
    CACHE_VOLUME,
    DOWNLOAD_CONTAINER,
    ENGINE_CONTAINER,
    MODEL_VOLUME,
    RESERVED_VOLUMES,
)
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render.common import Object, requests
from sglang_rollout.controller.render.hashing import digest
from sglang_rollout.controller.render.start import FETCH_SCRIPT

CACHE_DIR = "/var/cache/sglang-rollout"
"""Where the engine sees its cache."""


def volumes(rollout: SGLangRollout) -> list[Object]:
    """Return the volumes."""
    model, cache = rollout.spec.model, rollout.spec.engine.cache
    made: list[Object] = []
    if model.volume:
        # A folder that a download fills is made for it; any other one that is missing is a mistake that the kubelet names.
        kind = "DirectoryOrCreate" if model.download else "Directory"
        made.append({"name": MODEL_VOLUME, **_source(model.volume.claim, model.volume.host_path, kind)})
    elif model.download:
        made.append({"name": MODEL_VOLUME, "emptyDir": {}})
    if cache:
        made.append({"name": CACHE_VOLUME, **_source(cache.claim, cache.host_path, "DirectoryOrCreate")})
    return made


def mounts(rollout: SGLangRollout) -> list[Object]:
    """Return the mounts of the engine container."""
    model, engine = rollout.spec.model, rollout.spec.engine
    made: list[Object] = []
    if model.volume or model.download:
        made.append({"name": MODEL_VOLUME, "mountPath": _model_mount(rollout), "readOnly": True})
    if engine.cache:
        # Kernels of one release of torch or SGLang are no use to another, and some are found by name only.
        made.append({"name": CACHE_VOLUME, "mountPath": CACHE_DIR, "subPath": digest(engine.image)})
    return made


def downloads(rollout: SGLangRollout) -> list[Object]:
    """Return the init container that fetches the model; none if nobody asked for it."""
    model = rollout.spec.model
    if model.download is None:
        return []
    env = [variable.model_dump(mode="json", by_alias=True, exclude_none=True) for variable in model.download.env]
    return [
        {
            "name": DOWNLOAD_CONTAINER,
            "image": rollout.spec.engine.image,
            "command": ["/bin/sh", "-c", FETCH_SCRIPT, DOWNLOAD_CONTAINER, *model.download.command],
            "env": [{"name": MODEL_PATH_ENV, "value": model.path}, *env],
            "resources": requests("100m", "256Mi"),
            "securityContext": {"allowPrivilegeEscalation": False},
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [{"name": MODEL_VOLUME, "mountPath": _model_mount(rollout)}],
        }
    ]


def _model_mount(rollout: SGLangRollout) -> str:
    volume = rollout.spec.model.volume
    return volume.mount_path if volume else MODELS


def _source(claim: str | None, host_path: str | None, kind: str) -> Object:
    if claim:
        return {"persistentVolumeClaim": {"claimName": claim}}
    return {"hostPath": {"path": host_path, "type": kind}}


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
