"""What was read of one rollout, and the sentences about what could not be read. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from pydantic import ValidationError

from sglang_rollout.api.intent import Intent
from sglang_rollout.api.status import EnginePhase, RecentUpdate, RolloutStatus
from sglang_rollout.controller.decide.engine_status import format_version
from sglang_rollout.controller.decide.status import build_recent_update
from sglang_rollout.controller.render import names
from sglang_rollout.kube.resources import Object
from sglang_rollout.wire.record import Record

M = TypeVar("M", Intent, Record)


class UnreadableError(Exception):
    """An object has another form than this release knows. ``str()`` is a sentence."""


@dataclass(frozen=True)
class Observation:
    """One rollout: its SGLangRollout, and what its ConfigMaps hold."""

    rollout: Object
    """The SGLangRollout."""
    status: RolloutStatus | None
    """Its status; None if the operator has written none."""
    intent: Intent | None = None
    """What the operator asks of the coordinator; None: not written, or not readable."""
    record: Record | None = None
    """What the coordinator has recorded; None: not written, or not readable."""
    gaps: tuple[str, ...] = ()
    """Sentences about what could not be read."""

    @property
    def name(self) -> str:
        """Name of the rollout."""
        return str(self.rollout["metadata"]["name"])

    @property
    def namespace(self) -> str:
        """Namespace of the rollout."""
        return str(self.rollout["metadata"].get("namespace", "default"))

    @property
    def generation(self) -> int:
        """Generation of the spec."""
        return int(self.rollout["metadata"].get("generation", 0))

    @property
    def state(self) -> str:
        """``spec.state``."""
        return str(self.rollout["spec"].get("state", "Active"))

    @cached_property
    def updates(self) -> list[RecentUpdate]:
        """The last updates that ended, newest first: of the record, or else of the status, which follows the record."""
        if self.record is not None:
            return [build_recent_update(update) for update in self.record.recent_updates]
        weights = self.status.weights if self.status is not None else None
        return list((weights.recent_updates if weights is not None else None) or [])

    @cached_property
    def version(self) -> str:
        """The committed version as text for people; empty while it is not known."""
        if self.record is not None:
            committed, author = self.record.committed, self.record.author
            label, run, step = format_version(committed), committed.run, committed.step
        elif self.status is not None and self.status.weights is not None:
            weights = self.status.weights
            label, run, step, author = weights.committed_version, weights.run, weights.step, weights.author or ""
        else:
            return ""
        if run == 0:
            return f"{label}, the weights at {self.rollout['spec'].get('model', {}).get('path', 'model.path')}"
        return f"{label} (run {run}, step {step})" + (f", pushed by {author}" if author else "")

    @cached_property
    def updating_count(self) -> int:
        """Engines that are in a weight update."""
        rows = self.status.engines if self.status is not None else []
        return sum(row.phase is EnginePhase.UPDATING for row in rows)


def build_observation(rollout: Object, intent: Object | None, record: Object | None, gaps: tuple[str, ...] = ()) -> Observation:
    """Return the observation of a rollout from its SGLangRollout and its two ConfigMaps.

    Args:
        rollout: The SGLangRollout.
        intent: ConfigMap ``NAME-intent``; None if there is none, or if it cannot be read.
        record: ConfigMap ``NAME-weights``, as ``intent``.
        gaps: Sentences about what could not be read.

    Raises:
        UnreadableError: The status has another form than this release knows.
    """
    status = rollout.get("status")
    try:
        parsed = RolloutStatus.model_validate(status) if status else None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UnreadableError(
            f"status.{where} has a form that this command does not know ({first['msg']}): use the release of the operator that wrote it."
        ) from error
    asked, intent_gaps = _parse(Intent, intent, names.INTENT_KEY)
    recorded, record_gaps = _parse(Record, record, names.WEIGHTS_KEY)
    return Observation(rollout, parsed, asked, recorded, (*gaps, *intent_gaps, *record_gaps))


def _parse(model: type[M], config_map: Object | None, key: str) -> tuple[M | None, list[str]]:
    """Return the message in a ConfigMap; None if there is none. Then, a sentence if this release cannot read it."""
    text = ((config_map or {}).get("data") or {}).get(key)
    try:
        return (model.model_validate_json(text) if text else None), []
    except ValidationError:
        return None, [f"{key} has a form that this command does not know, and is not shown: use the release of the operator that wrote it."]
