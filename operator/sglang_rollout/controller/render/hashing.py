"""Hashes of the spec (an engine's revision) and of rendered objects."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from sglang_rollout.api.scheduling_spec import GangScope
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render import names, tls
from sglang_rollout.controller.render.staging import pod_revision

_OF_ENGINES = {"model", "engine", "scheduling", "sharing", "pod_template"}


def digest(value: Any) -> str:
    """Return a short hash of a JSON value, independent of the order of keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def revision(rollout: SGLangRollout, engine: int = 0) -> str:
    """Return the revision of an engine, by its index: a hash of what the user wrote about engines.

    All engines have the same revision, unless surplus engines are scheduled differently.

    The hash excludes the operator's images, the rendered objects, and defaults, so that an upgrade of the operator restarts no engine.
    """
    written = rollout.spec.model_dump(mode="json", by_alias=True, include=_OF_ENGINES, exclude_defaults=True)
    # Adapters change while engines run, and disabled adapters do not change an engine.
    written.get("engine", {}).get("lora", {}).pop("adapters", None)
    if rollout.spec.engine.lora is not None and not rollout.spec.engine.lora.enabled:
        del written["engine"]["lora"]
    # Decides where engines run next; engines do not change.
    scheduling = written.get("scheduling", {})
    if scheduling.pop("avoidNodes", None) is not None and not scheduling:
        del written["scheduling"]
    # A field of the PodGroup only.
    scheduling.get("gang", {}).pop("timeoutSeconds", None)
    # The router reads all else of security.
    if volumes := tls.agent_volumes(rollout):
        written["tls"] = volumes
    if staged := pod_revision(rollout):
        written["staging"] = staged
    if surplus := _surplus_fields(rollout, engine):
        written["beyond"] = surplus  # this key must not change: it is part of the hash
    return digest(written)


def revisions(rollout: SGLangRollout) -> dict[str, str]:
    """Return the revision of each wanted engine, by its name."""
    base, engines = rollout.spec.base, rollout.spec.engines
    first, others = revision(rollout), revision(rollout, base)
    return {names.engine_name(rollout.name, index): first if index < base else others for index in range(engines)}


def _surplus_fields(rollout: SGLangRollout, engine: int) -> dict[str, Any]:
    """Return what distinguishes the pods of a surplus engine; empty for engines of the base."""
    elastic, gang = rollout.spec.elastic, rollout.spec.scheduling.gang
    if elastic is None or engine < elastic.base:
        return {}
    grouped = {"ownGroup": True} if gang is not None and gang.scope is GangScope.BASE else {}
    priority = {"priorityClassName": elastic.priority_class_name} if elastic.priority_class_name else {}
    return {**grouped, **priority}
