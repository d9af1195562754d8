"""Check that ``podTemplate`` leaves the operator's volumes and folders alone. Pure.

Gate, agent and coordinator keep credentials and sockets in volumes that no other container mounts. Rules of the CRD protect the volumes
themselves. Mounts are checked here, because a rule over all mounts of all containers would be too expensive for the API server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglang_rollout.api.pod_template import ENGINE_CONTAINER, PRIVATE_VOLUMES, ROUTER_VOLUMES, SHARED_VOLUMES
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render.names import PLUGIN_DIR, REPORTS_DIR, RUN_DIR, STAGED_DIR, VERDICTS_DIR

_CONTAINERS = ("containers", "initContainers")
_ENGINE_FOLDERS = {
    RUN_DIR: "the operator starts and ends the engine by files in",
    STAGED_DIR: "the engine loads staged versions from",
    PLUGIN_DIR: "SGLang imports the plug-in from",
    REPORTS_DIR: "the agent reads the reports of the plug-in in",
    VERDICTS_DIR: "the agent reads how staged versions were loaded in",
}
"""Folders of the engine that no mount may hide, and why."""


def find_forbidden_mount(rollout: SGLangRollout) -> str:
    """Return the first mount of an overlay that is refused, as a sentence; empty if there is none. The overlays have a Pod's shape."""
    spec = rollout.spec
    for at, overlay, private in (
        ("spec.podTemplate", spec.pod_template, (*PRIVATE_VOLUMES, *SHARED_VOLUMES)),
        ("spec.router.podTemplate", spec.router.pod_template, ROUTER_VOLUMES),
    ):
        written = overlay.model_dump(mode="json", by_alias=True, exclude_unset=True) if overlay is not None else {}
        for container, mount in _mounts(written.get("spec") or {}):
            name, path = mount.get("name"), str(mount.get("mountPath") or "")
            begin = f"{at}: the container {container} must not"
            if name in private:
                return f"{begin} mount the volume {name}: it belongs to the operator's own containers."
            if {".", ".."} & set(path.split("/")):
                return f"{begin} mount anything at {path}: write the path without the elements . and .."
            if at == "spec.podTemplate" and container == ENGINE_CONTAINER:
                for folder, why in _ENGINE_FOLDERS.items():
                    if _hides(path, folder):
                        return f"{begin} mount anything at {path}: {why} {folder}."
    return ""


def _mounts(pod: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for containers in _CONTAINERS:
        for container in pod.get(containers) or []:
            for mount in container.get("volumeMounts") or []:
                yield container["name"], mount


def _hides(path: str, folder: str) -> bool:
    """Return True if a mount at this path hides the folder, or a part of it."""
    whole = "/" + "/".join(filter(None, path.split("/")))
    return f"{folder}/".startswith(f"{whole.rstrip('/')}/") or whole.startswith(f"{folder}/")
