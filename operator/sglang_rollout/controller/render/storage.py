"""Volumes of an engine pod for model files and compiled kernels, and the container that downloads a model.

The agent gets the engine's mounts of user volumes, read-only, because it checks checkpoints before the engine loads them.
The agent also gets the variables that locate the engine's Hugging Face cache, because it compares checkpoints with the model there.
"""

from __future__ import annotations

from posixpath import normpath

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
from sglang_rollout.controller.render.common import Object, unprivileged
from sglang_rollout.controller.render.hashing import digest
from sglang_rollout.controller.render.resources import own_resources
from sglang_rollout.controller.render.start import FETCH_SCRIPT

CACHE_DIR = "/var/cache/sglang-rollout"
"""Path of the cache in the engine's container."""
_NOT_SHARED = frozenset(RESERVED_VOLUMES) - {MODEL_VOLUME}

HUB_DIR = "/var/cache/huggingface"
"""Path of the engine's own Hugging Face cache in its container. No other container has it, because model code can write there."""
HUB_VARIABLE = "HF_HUB_CACHE"
_DOWNLOAD_FLAG = "--download-dir"
_CACHE_FOLDERS = frozenset({".cache", "huggingface"})
"""Parts of the path of a mount over the cache of an image."""
HUB_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")
"""Variables by which huggingface_hub finds its cache."""

_MOUNT_FIELDS = ("name", "mountPath", "subPath")
"""Fields of a mount that the agent copies: not ``mountPropagation``, which is for writers."""


def volumes(rollout: SGLangRollout) -> list[Object]:
    """Return the volumes of model and cache."""
    model, cache = rollout.spec.model, rollout.spec.engine.cache
    result: list[Object] = []
    if model.volume:
        # Only a download may create the folder. A missing folder is otherwise a mistake, which the kubelet reports.
        kind = "DirectoryOrCreate" if model.download else "Directory"
        result.append({"name": MODEL_VOLUME, **volume_source(model.volume.claim, model.volume.host_path, kind)})
    elif model.download:
        result.append(_own_volume(rollout))
    if cache:
        result.append({"name": CACHE_VOLUME, **volume_source(cache.claim, cache.host_path, "DirectoryOrCreate")})
    return result


def mounts(rollout: SGLangRollout) -> list[Object]:
    """Return the mounts of the engine container."""
    model, engine = rollout.spec.model, rollout.spec.engine
    result: list[Object] = []
    if model.volume or model.download:
        result.append({"name": MODEL_VOLUME, "mountPath": _model_mount(rollout), "readOnly": True})
    if engine.cache:
        # A folder per image, because another release of torch or SGLang may find kernels by their names only.
        result.append({"name": CACHE_VOLUME, "mountPath": CACHE_DIR, "subPath": digest(engine.image)})
    return result


def downloads(rollout: SGLangRollout) -> list[Object]:
    """Return the init container that downloads the model; none without ``model.download``."""
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
            "resources": own_resources(DOWNLOAD_CONTAINER, model.download.resources),
            "securityContext": unprivileged(),
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [{"name": MODEL_VOLUME, "mountPath": _model_mount(rollout)}],
        }
    ]


def _model_mount(rollout: SGLangRollout) -> str:
    volume = rollout.spec.model.volume
    return volume.mount_path if volume else MODELS


def volume_source(claim: str | None, host_path: str | None, kind: str) -> Object:
    """Return the source of a volume: a claim, or a folder of the node.

    Args:
        claim: Name of a PersistentVolumeClaim; None: a folder of the node.
        host_path: The folder.
        kind: Kubernetes' type of the folder, such as ``Directory``.
    """
    if claim:
        return {"persistentVolumeClaim": {"claimName": claim}}
    return {"hostPath": {"path": host_path, "type": kind}}


def with_hub_cache(template: Object, rollout: SGLangRollout) -> Object:
    """Return the pod template with a volume for what the engine downloads, so that the files outlive the engine's container.

    A cache that the user chose stays: the variable would hide it.
    """
    spec = template["spec"]
    engine = next(container for container in spec["containers"] if container["name"] == ENGINE_CONTAINER)
    if not rollout.spec.model.is_fetched_by_engine or _has_hub_cache(engine):
        return template
    cached = {
        **engine,
        "env": [*(engine.get("env") or []), {"name": HUB_VARIABLE, "value": HUB_DIR}],
        "volumeMounts": [*engine["volumeMounts"], {"name": MODEL_VOLUME, "mountPath": HUB_DIR}],
    }
    containers = [cached if container is engine else container for container in spec["containers"]]
    return {**template, "spec": {**spec, "containers": containers, "volumes": [*spec["volumes"], _own_volume(rollout)]}}


def _own_volume(rollout: SGLangRollout) -> Object:
    """Return a volume of the pod for the files of the model."""
    return {"name": MODEL_VOLUME, "emptyDir": {"sizeLimit": rollout.spec.model.cache_size}}


def _has_hub_cache(engine: Object) -> bool:
    """Return True if the user says where the engine's downloads are, by a variable, a flag or a mount."""
    has_variable = any(variable.get("name") in HUB_VARIABLES for variable in engine.get("env") or [])
    has_flag = any(str(argument).partition("=")[0] == _DOWNLOAD_FLAG for argument in engine.get("args") or [])
    folders = {part for mount in engine["volumeMounts"] for part in str(mount.get("mountPath", "")).split("/")}
    return has_variable or has_flag or not folders.isdisjoint(_CACHE_FOLDERS)


def with_shared_mounts(template: Object) -> Object:
    """Return the pod template with the engine's mounts of user volumes in the agent's container as well."""
    spec = template["spec"]
    engine = next(container for container in spec["containers"] if container["name"] == ENGINE_CONTAINER)
    shared = [
        {**{key: mount[key] for key in _MOUNT_FIELDS if key in mount}, "readOnly": True}
        for mount in engine.get("volumeMounts") or []
        if _is_shared(mount)
    ]
    if not shared:
        return template
    caches = [variable for variable in engine.get("env") or [] if _is_cache(variable)]
    containers = [
        _add_mounts(container, shared, caches) if container["name"] == AGENT_CONTAINER else container
        for container in spec.get("initContainers") or []
    ]
    return {**template, "spec": {**spec, "initContainers": containers}}


def _add_mounts(agent: Object, shared: list[Object], caches: list[Object]) -> Object:
    named = {variable["name"] for variable in caches}
    env = [*(variable for variable in agent.get("env") or [] if variable["name"] not in named), *caches]
    return {**agent, "env": env, "volumeMounts": [*agent["volumeMounts"], *shared]}


def _is_cache(variable: Object) -> bool:
    """Return True for a variable that the agent can copy, which refers to no other variable of the engine."""
    return variable.get("name") in HUB_VARIABLES and isinstance(variable.get("value"), str) and "$(" not in variable["value"]


def _is_shared(mount: Object) -> bool:
    """Return True for a mount that the agent can copy: it hides none of its folders and needs no variable (``subPathExpr``)."""
    # Resolved as the container runtime does it. normpath() keeps two leading slashes.
    path = "/" + normpath("/" + str(mount.get("mountPath", ""))).lstrip("/")
    hides = path == "/" or any(path == own or path.startswith(f"{own}/") for own in OWN_FOLDERS)
    return mount.get("name") not in _NOT_SHARED and "subPathExpr" not in mount and not hides
