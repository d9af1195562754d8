"""Compare a live object with its rendered form. Pure.

Two checks, because neither suffices alone. The hash of the rendered object, kept in an annotation, shows that the wanted object
changed, even if a field was only removed. The comparison shows that the live object was changed: every rendered field must exist
with its value. Fields that are not rendered belong to others (defaults, autoscalers, injectors) and are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_rollout.controller.render.common import is_same_quantity
from sglang_rollout.controller.render.hashing import digest
from sglang_rollout.controller.render.names import ANNOTATION_APPLIED
from sglang_rollout.controller.render.overlay import MERGE_KEYS, identity

_QUANTITY_FIELDS = frozenset({"requests", "limits", "capacity", "sizeLimit"})
"""Fields whose quantities the API server rewrites: ``1024Mi`` comes back as ``1Gi``."""

_KEPT_ZEROS = frozenset(
    {
        "automountServiceAccountToken",
        "allowPrivilegeEscalation",
        "readOnlyRootFilesystem",
        "runAsNonRoot",
        "runAsUser",
        "runAsGroup",
        "enableServiceLinks",
        "replicas",
    }
)
"""Fields whose false or 0 the API server keeps. It drops empty values of other fields, so that they look missing."""

_KEPT_EMPTY = frozenset({"emptyDir", "labelSelector", "namespaceSelector"})
"""Maps that have a meaning when empty, so that the API server keeps them. It drops other empty maps."""

_FILLED_IN = frozenset(
    {
        "apiVersion",
        "dnsPolicy",
        "failureThreshold",
        "imagePullPolicy",
        "path",
        "periodSeconds",
        "protocol",
        "restartPolicy",
        "scheme",
        "schedulerName",
        "serviceAccountName",
        "successThreshold",
        "terminationMessagePath",
        "terminationMessagePolicy",
        "timeoutSeconds",
    }
)
"""Fields in which the API server replaces an empty string or 0 by its default."""

_ATOMIC_MAPS = frozenset({"spec.selector"})
"""Maps that the API server treats as one value (``x-kubernetes-map-type: atomic``). An additional key changes their meaning: a
Service with another key in its selector selects nothing."""

_SERVER_SIDE_ONLY = frozenset({"stringData"})


def stamp(rendered: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rendered`` with its own hash in an annotation, ready to be applied."""
    metadata = dict(rendered["metadata"])
    # The token of a Secret is excluded: it is added later, and an annotation must not carry a hash of it.
    hashed = {key: value for key, value in rendered.items() if rendered["kind"] != "Secret" or key != "data"}
    metadata["annotations"] = {**metadata.get("annotations", {}), ANNOTATION_APPLIED: digest(hashed)}
    return {**rendered, "metadata": metadata}


def is_applied(stamped: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Return True if ``stamped`` was the last object applied to ``live``. It may have been changed or defaulted since."""
    return bool(stamped["metadata"]["annotations"][ANNOTATION_APPLIED] == _applied_hash(live))


def _applied_hash(live: Mapping[str, Any]) -> Any:
    return (live.get("metadata", {}).get("annotations") or {}).get(ANNOTATION_APPLIED)


def find_difference(stamped: Mapping[str, Any], live: Mapping[str, Any]) -> str:
    """Return where ``live`` differs from ``stamped``, as a path; empty if it does not."""
    if not is_applied(stamped, live):
        return "the wanted object changed" if _applied_hash(live) else f"metadata.annotations[{ANNOTATION_APPLIED}]"
    return _compare_mapping(stamped, live, "", False)


def _compare_value(rendered: Any, live: Any, path: str, key: str, quantities: bool) -> str:
    quantities = quantities or key in _QUANTITY_FIELDS
    if path in _ATOMIC_MAPS:
        return "" if rendered == live else path
    if isinstance(rendered, Mapping):
        return _compare_mapping(rendered, live, path, quantities) if isinstance(live, Mapping) else path
    if isinstance(rendered, list):
        return _compare_list(rendered, live, path, key) if isinstance(live, list) else path
    if rendered == live and isinstance(rendered, bool) == isinstance(live, bool):
        return ""
    if key in _FILLED_IN and not rendered:
        return ""
    return "" if quantities and is_same_quantity(rendered, live) else path


def _compare_mapping(rendered: Mapping[str, Any], live: Mapping[str, Any], path: str, quantities: bool) -> str:
    for key, value in rendered.items():
        below = f"{path}.{key}" if path else key
        if key in _SERVER_SIDE_ONLY:
            continue
        if live.get(key) is None:
            if _is_dropped(key, value):
                continue
            return below
        found = _compare_value(value, live[key], below, key, quantities)
        if found:
            return found
    return ""


def _is_dropped(key: str, value: Any) -> bool:
    return value is None or (not value and key not in _KEPT_ZEROS | _KEPT_EMPTY)


def _compare_list(rendered: list[Any], live: list[Any], path: str, key: str) -> str:
    keys = MERGE_KEYS.get(key)
    if keys and all(identity(item, keys) for item in rendered):
        return _compare_map_list(rendered, live, path, keys)
    if len(rendered) != len(live):
        return path
    for index, (wanted, found) in enumerate(zip(rendered, live, strict=True)):
        where = _compare_value(wanted, found, f"{path}[{index}]", "", False)
        if where:
            return where
    return ""


def _compare_map_list(rendered: list[Any], live: list[Any], path: str, keys: tuple[str, ...]) -> str:
    """Compare items by their key; foreign items may stand between ours."""
    by_key = {identity(item, keys): item for item in live}
    for item in rendered:
        which = identity(item, keys)
        where = f"{path}[{which[0] if which else ''}]"
        if which not in by_key:
            return where
        found = _compare_value(item, by_key[which], where, "", False)
        if found:
            return found
    return ""
