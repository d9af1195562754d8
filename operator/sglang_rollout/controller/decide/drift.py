"""Decide if a child must be applied again. Pure.

Each of these signs suffices:

- The digest of the rendered object, kept in an annotation, differs: the operator wants another object.
- The fields that the operator owns (``metadata.managedFields``) differ from those after its last apply. If another client changes
  a field, the API server takes the ownership from the operator. Fields that the operator never set are left to other clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_rollout.controller.render.hashing import digest
from sglang_rollout.controller.render.names import ANNOTATION_APPLIED, FIELD_MANAGER

Ownership = dict[str, str]
"""Result of :func:`read_ownership` after the last apply of each child, by UID."""


def stamp(rendered: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rendered`` with its own hash in an annotation, ready to be applied."""
    metadata = dict(rendered["metadata"])
    # The data of a Secret is excluded, because an annotation must not contain a hash of it. It is compared with the live object.
    hashed = {key: value for key, value in rendered.items() if rendered["kind"] != "Secret" or key != "data"}
    metadata["annotations"] = {**metadata.get("annotations", {}), ANNOTATION_APPLIED: digest(hashed)}
    return {**rendered, "metadata": metadata}


def read_ownership(live: Mapping[str, Any]) -> str:
    """Return a digest of the fields that the operator owns in a live object; empty if it owns none."""
    entries = live.get("metadata", {}).get("managedFields") or []
    ours = [entry.get("fieldsV1") for entry in entries if entry.get("manager") == FIELD_MANAGER and not entry.get("subresource")]
    return digest({"fields": ours}) if ours else ""


def find_difference(stamped: Mapping[str, Any], live: Mapping[str, Any], ownership: Ownership | None = None) -> str:
    """Return why ``live`` must be applied again; empty if there is no need.

    Args:
        stamped: The wanted object, from :func:`stamp`.
        live: The object in the cluster.
        ownership: What the operator owned after its last applies. None: ignore changes by other clients.
    """
    applied = (live["metadata"].get("annotations") or {}).get(ANNOTATION_APPLIED)
    if applied != stamped["metadata"]["annotations"][ANNOTATION_APPLIED]:
        return "the wanted object changed" if applied else f"metadata.annotations[{ANNOTATION_APPLIED}] is missing"
    if stamped["kind"] == "Secret" and not (stamped.get("data") or {}).items() <= (live.get("data") or {}).items():
        return "the credentials changed"
    if ownership is None:
        return ""
    known = ownership.get(live["metadata"].get("uid", ""))
    if known is None:
        return "first apply of this operator process"
    return "" if known == read_ownership(live) else "another client changed it"
