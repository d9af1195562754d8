"""Does a live object still say what was rendered?

Two questions, because neither suffices alone. The hash of the rendered object, kept in an annotation, shows that we
want something else now, also when a field is gone from what we want. The comparison shows that somebody changed the
live object: every rendered field must be there with its value. Fields that we did not render belong to others
(defaults, autoscalers, injectors) and are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_rollout.controller.render import quantity
from sglang_rollout.controller.render.hashing import digest
from sglang_rollout.controller.render.names import ANNOTATION_APPLIED
from sglang_rollout.controller.render.overlay import MERGE_KEYS, identity

_QUANTITY_FIELDS = frozenset({"requests", "limits", "capacity", "sizeLimit"})
"""The API server rewrites what stands here: ``1024Mi`` comes back as ``1Gi``."""

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
"""Fields whose false or 0 the API server keeps. From others it drops an empty value, which then looks like a missing
one."""

_KEPT_EMPTY = frozenset({"emptyDir", "labelSelector", "namespaceSelector"})
"""Maps that say something when they are empty, so that the API server keeps them. Others it drops, as it drops empty values."""

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
"""Fields in which the API server writes its default over an empty text or a 0."""

_WHOLE = frozenset({"spec.selector"})
"""Maps that are one value to the API server (``x-kubernetes-map-type: atomic``) and mean something else with a key more: a
Service with another key in its selector selects nothing."""

_SERVER_SIDE_ONLY = frozenset({"stringData"})


def stamped(rendered: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rendered`` with its own hash in an annotation: what is applied."""
    metadata = dict(rendered["metadata"])
    # Without the token of a Secret: it is put in after this, and a hash of it has no business in an annotation.
    hashed = {key: value for key, value in rendered.items() if rendered["kind"] != "Secret" or key != "data"}
    metadata["annotations"] = {**metadata.get("annotations", {}), ANNOTATION_APPLIED: digest(hashed)}
    return {**rendered, "metadata": metadata}


def is_applied(stamp: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Whether ``live`` was made from what :func:`stamped` made. It may have been changed since, or may be what the API server makes of
    it."""
    return bool(stamp["metadata"]["annotations"][ANNOTATION_APPLIED] == _applied(live))


def _applied(live: Mapping[str, Any]) -> Any:
    return (live.get("metadata", {}).get("annotations") or {}).get(ANNOTATION_APPLIED)


def difference(stamp: Mapping[str, Any], live: Mapping[str, Any]) -> str:
    """Return where ``live`` differs from what :func:`stamped` made, as a path; empty if it does not."""
    if not is_applied(stamp, live):
        return "what is wanted changed" if _applied(live) else f"metadata.annotations[{ANNOTATION_APPLIED}]"
    return _mapping(stamp, live, "", False)


def _value(rendered: Any, live: Any, path: str, key: str, quantities: bool) -> str:
    quantities = quantities or key in _QUANTITY_FIELDS
    if path in _WHOLE:
        return "" if rendered == live else path
    if isinstance(rendered, Mapping):
        return _mapping(rendered, live, path, quantities) if isinstance(live, Mapping) else path
    if isinstance(rendered, list):
        return _list(rendered, live, path, key) if isinstance(live, list) else path
    if rendered == live and isinstance(rendered, bool) == isinstance(live, bool):
        return ""
    if key in _FILLED_IN and not rendered:
        return ""
    return "" if quantities and quantity.same(rendered, live) else path


def _mapping(rendered: Mapping[str, Any], live: Mapping[str, Any], path: str, quantities: bool) -> str:
    for key, value in rendered.items():
        below = f"{path}.{key}" if path else key
        if key in _SERVER_SIDE_ONLY:
            continue
        if live.get(key) is None:
            if _is_dropped(key, value):
                continue
            return below
        found = _value(value, live[key], below, key, quantities)
        if found:
            return found
    return ""


def _is_dropped(key: str, value: Any) -> bool:
    return value is None or (not value and key not in _KEPT_ZEROS | _KEPT_EMPTY)


def _list(rendered: list[Any], live: list[Any], path: str, key: str) -> str:
    keys = MERGE_KEYS.get(key)
    if keys and all(identity(item, keys) for item in rendered):
        return _map_list(rendered, live, path, keys)
    if len(rendered) != len(live):
        return path
    for index, (wanted, found) in enumerate(zip(rendered, live, strict=True)):
        where = _value(wanted, found, f"{path}[{index}]", "", False)
        if where:
            return where
    return ""


def _map_list(rendered: list[Any], live: list[Any], path: str, keys: tuple[str, ...]) -> str:
    """Items are found by their key; items of others may stand between ours."""
    by_key = {identity(item, keys): item for item in live}
    for item in rendered:
        which = identity(item, keys)
        where = f"{path}[{which[0] if which else ''}]"
        if which not in by_key:
            return where
        found = _value(item, by_key[which], where, "", False)
        if found:
            return found
    return ""
