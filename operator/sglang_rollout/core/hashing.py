"""Hashes of objects: of what the user wrote (revision) and of what was rendered (applied)."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from sglang_rollout.api.v1alpha1 import SGLangRollout

_OF_ENGINES = {"model", "engine", "scheduling", "pod_template"}


def digest(value: Any) -> str:
    """Return a short hash of a JSON value; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def revision(rollout: SGLangRollout) -> str:
    """Return the revision of the engines: a hash of what the user wrote about them, and of nothing else.

    Neither our images nor how we render enters it, and defaults are left out, so that an upgrade of the operator
    restarts no engine: not one that brings a new field, and not one that changes how a pod looks.
    """
    written = rollout.spec.model_dump(mode="json", by_alias=True, include=_OF_ENGINES, exclude_defaults=True)
    # Adapters come and go while engines run.
    written.get("engine", {}).get("lora", {}).pop("adapters", None)
    # Brings files to nodes; engines themselves do not change.
    written.get("model", {}).pop("prefetch", None)
    # Says when to move engines that fail, not how engines are made.
    scheduling = written.get("scheduling", {})
    if scheduling.pop("avoidNodes", None) is not None and not scheduling:
        del written["scheduling"]
    return digest(written)
