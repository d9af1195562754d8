"""Check that the open parts of a spec have the shape of a Pod. Pure.

The open parts are ``podTemplate`` and ``affinity``, also those of router and weight store; they are checked as far as rendering reads them.
The API server stores any value there and checks it only when a child is applied. Rendering would fail on another shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglang_rollout.api.v1alpha1 import SGLangRollout

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_MAP: Mapping[str, Any] = {}
_NAMED = [{"name": str}]

_CONTAINER = {
    "env": _NAMED,
    "envFrom": [_MAP],
    "ports": [{"containerPort": int, "protocol": str}],
    "resources": {"requests": _MAP, "limits": _MAP},
    "securityContext": _MAP,
    "volumeDevices": [{"devicePath": str}],
    "volumeMounts": [{"name": str, "mountPath": str}],
}
_AFFINITY = {
    "nodeAffinity": {_REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [_MAP], "matchFields": [_MAP]}]}},
    "podAffinity": {_REQUIRED: [_MAP]},
    "podAntiAffinity": {_REQUIRED: [_MAP]},
}
_POD = {
    "affinity": _AFFINITY,
    "containers": [_CONTAINER],
    "ephemeralContainers": _NAMED,
    "hostAliases": [{"ip": str}],
    "imagePullSecrets": _NAMED,
    "initContainers": [_CONTAINER],
    "nodeSelector": _MAP,
    "resourceClaims": _NAMED,
    "securityContext": _MAP,
    "tolerations": [_MAP],
    "topologySpreadConstraints": [{"topologyKey": str, "whenUnsatisfiable": str}],
}

_TYPE_NAMES: tuple[tuple[type, str], ...] = (
    (Mapping, "a map of fields"),
    (list, "a list"),
    (str, "a text"),
    (bool, "true or false"),
    (int, "a number"),
    (float, "a number with a fraction"),
)


def find_misfit(rollout: SGLangRollout) -> str:
    """Return the first field whose shape differs from a Pod's, as a sentence; empty if there is none."""
    spec = rollout.spec
    found: list[str] = []
    store = spec.weights.store
    for at, scheduling, overlay in (
        ("spec", spec.scheduling, spec.pod_template),
        ("spec.router", spec.router.scheduling, spec.router.pod_template),
        *((("spec.weights.store", store.scheduling, None),) if store is not None else ()),
    ):
        found += _find_misfits(scheduling.affinity, _AFFINITY, f"{at}.scheduling.affinity")
        if overlay is not None:
            written = overlay.model_dump(mode="json", by_alias=True, exclude_unset=True)
            found += _find_misfits(written.get("spec"), _POD, f"{at}.podTemplate.spec")
    return f"{found[0]}. Write it as in a Pod." if found else ""


def _find_misfits(value: Any, shape: Any, path: str) -> Iterator[str]:
    """Yield what does not fit. A null removes a field, but cannot be an item of a list."""
    if value is None and not path.endswith("]"):
        return
    wanted = next(kind for kind, _ in _TYPE_NAMES if (shape is kind if isinstance(shape, type) else isinstance(shape, kind)))
    other = not isinstance(value, wanted) or (wanted is int and isinstance(value, bool))
    if other:
        yield f"{path} must be {_name_type(wanted)}, not {_name_type_of(value)}"
    elif isinstance(shape, Mapping):
        for key, below in shape.items():
            yield from _find_misfits(value.get(key), below, f"{path}.{key}")
    elif isinstance(shape, list):
        for index, item in enumerate(value):
            yield from _find_misfits(item, shape[0], f"{path}[{index}]")


def _name_type(wanted: type) -> str:
    return next(name for kind, name in _TYPE_NAMES if kind is wanted)


def _name_type_of(value: Any) -> str:
    return next((name for kind, name in _TYPE_NAMES if isinstance(value, kind)), "null")
