"""Volumes of an engine pod for model files and for compiled kernels, and the container that fetches a model."""

from __future__ import annotations

from sglang_rollout.api.model_spec import MODEL_PATH_ENV, MODELS
from sglang_rollout.api.pod_template import CACHE_VOLUME, DOWNLOAD_CONTAINER, MODEL_VOLUME
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
