"""Hashes of objects: of what the user wrote (revision) and of what was rendered (applied)."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from sglang_rollout.api.scheduling_spec import GangScope
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render import names

_OF_ENGINES = {"model", "engine", "scheduling", "sharing", "pod_template"}


def digest(value: Any) -> str:
    """Return a short hash of a JSON value; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def revision(rollout: SGLangRollout, engine: int = 0) -> str:
    """Return the revision of an engine, by its index: a hash of what the user wrote about it, and of nothing else.

    It is one for all engines, unless those beyond the base are scheduled in another way. Then an engine that changes sides is
    outdated, and the others are not.

    Neither our images nor how we render enters it, and defaults are left out, so that an upgrade of the operator
    restarts no engine: not one that brings a new field, and not one that changes how a pod looks.
    """
    written = rollout.spec.model_dump(mode="json", by_alias=True, include=_OF_ENGINES, exclude_defaults=True)
    # Adapters come and go while engines run; what is switched off is in no engine.
    written.get("engine", {}).get("lora", {}).pop("adapters", None)
    if rollout.spec.engine.lora is not None and not rollout.spec.engine.lora.enabled:
        del written["engine"]["lora"]
    # Brings files to nodes; engines themselves do not change.
    written.get("model", {}).pop("prefetch", None)
    # Says when to move engines that fail, not how engines are made.
    scheduling = written.get("scheduling", {})
    if scheduling.pop("avoidNodes", None) is not None and not scheduling:
        del written["scheduling"]
    # The PodGroup's; the pods are the same.
    scheduling.get("gang", {}).pop("timeoutSeconds", None)
    if beyond := _beyond(rollout, engine):
        written["beyond"] = beyond
    return digest(written)


def revisions(rollout: SGLangRollout) -> dict[str, str]:
    """Return the revision of each wanted engine, by its name."""
    base, engines = rollout.spec.base, rollout.spec.engines
    first, others = revision(rollout), revision(rollout, base)
    return {names.engine_name(rollout.name, index): first if index < base else others for index in range(engines)}


def _beyond(rollout: SGLangRollout, engine: int) -> dict[str, Any]:
    """What makes the pods of an engine beyond the base other pods."""
    elastic, gang = rollout.spec.elastic, rollout.spec.scheduling.gang
    if elastic is None or engine < elastic.base:
        return {}
    grouped = {"ownGroup": True} if gang is not None and gang.scope is GangScope.BASE else {}
    priority = {"priorityClassName": elastic.priority_class_name} if elastic.priority_class_name else {}
    return {**grouped, **priority}
