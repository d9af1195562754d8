"""Merge an overlay into a rendered pod: a strategic merge, with the merge keys of Kubernetes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MERGE_KEYS: Mapping[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort", "protocol"),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "resourceClaims": ("name",),
}
"""Keys that identify the items of a list. Lists that are not named here are replaced."""

ADDED_FIRST = frozenset({"initContainers"})
"""Lists whose added items come first: the user's init containers run before gate and agent."""

_PORT_PROTOCOL = "TCP"


def merge(base: dict[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``overlay`` merged into it. None in the overlay removes a key. The arguments do not change."""
    merged = dict(base)
    for key, value in overlay.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            below = merged.get(key)
            merged[key] = merge(below if isinstance(below, dict) else {}, value)
        elif isinstance(value, list) and key in MERGE_KEYS and isinstance(merged.get(key), list):
            merged[key] = _merge_lists(merged[key], value, MERGE_KEYS[key], added_first=key in ADDED_FIRST)
        else:
            merged[key] = value
    return merged


def identity(item: Any, keys: tuple[str, ...]) -> tuple[Any, ...] | None:
    """Return the values of ``keys`` that identify an item of a list; None if a value is missing."""
    if not isinstance(item, Mapping):
        return None
    found = tuple(item.get(key) or (_PORT_PROTOCOL if key == "protocol" else item.get(key)) for key in keys)
    return None if None in found else found


def _merge_lists(base: list[Any], overlay: list[Any], keys: tuple[str, ...], *, added_first: bool) -> list[Any]:
    positions = {identity(item, keys): position for position, item in enumerate(base)}
    merged = list(base)
    added = []
    for item in overlay:
        which = identity(item, keys)
        if which is not None and which in positions:
            merged[positions[which]] = merge(merged[positions[which]], item)
        else:
            added.append(item)
    return [*added, *merged] if added_first else [*merged, *added]
