"""Observations of fleets in the states that users meet. The statuses are those that the operator builds."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from sglang_rollout.api.intent import Intent
from sglang_rollout.controller.decide.plan import Failure
from sglang_rollout.controller.render import names
from sglang_rollout.overview.observation import Observation, build_observation
from sglang_rollout.wire.record import EndedUpdate, Record, UpdateOutcome
from sglang_rollout.wire.states import BASE, Version
from tests.unit.controller.support.worlds import Object, cr, status_of, world

NOW = datetime(2026, 11, 21, 3, 0, 30, tzinfo=UTC)
TRAINER = "ml/RayCluster/grpo-7b"


def version(step: int) -> Version:
    return Version(run=2, step=step, label=f"step-{step}")


def ended(step: int, ago: float = 60.0, outcome: UpdateOutcome = UpdateOutcome.COMMITTED, **more: Any) -> EndedUpdate:
    """Return an update that ended some seconds ago."""
    finished = (NOW - timedelta(seconds=ago)).isoformat().replace("+00:00", "Z")
    made: dict[str, Any] = {"phases_ms": {"total": 2140}, "bytes": 15_231_233_024, "author": TRAINER, **more}
    return EndedUpdate(version=version(step), outcome=outcome, finished=finished, **made)


def recorded(*rows: Any, **more: Any) -> Record:
    """Return the record of a fleet that has committed step 12, unless ``more`` says otherwise."""
    made: dict[str, Any] = {"committed": version(12), "author": TRAINER, "holder": TRAINER, "last_update": ended(12), **more}
    return Record(term=1, epoch=3, intent_generation=4, engines=list(rows), **made)


def based(*rows: Any) -> Record:
    """Return the record of a fleet that no trainer has updated."""
    return Record(term=1, epoch=3, intent_generation=4, engines=list(rows), committed=BASE)


def observe(
    pods: list[Object],
    record: Record | None = None,
    *,
    replicas: int = 2,
    router: bool = True,
    failure: Failure | None = None,
    seen_before: Record | None = None,
    gaps: tuple[str, ...] = (),
    hidden: bool = False,
    **spec: Any,
) -> Observation:
    """Return what a user would read of a fleet.

    Args:
        pods: Pods of the engines.
        record: Record of the coordinator.
        replicas: ``spec.replicas``.
        router: True if the router runs.
        failure: Why the operator's plan could not be carried out.
        seen_before: Record that the operator had when it wrote the status. None: ``record``.
        gaps: As in an observation.
        hidden: True if the user may not read the ConfigMaps.
        spec: Further fields of the spec.
    """
    custom = cr(replicas, **spec)
    status = status_of(world(pods, written=seen_before or record, router=router, custom=custom), failure)
    intent = Intent(generation=4, name="demo", namespace="default", engines=[])
    maps = [
        {"data": {key: message.model_dump_json()}} if message is not None and not hidden else None
        for key, message in ((names.INTENT_KEY, intent), (names.WEIGHTS_KEY, record))
    ]
    return build_observation({**custom, "status": status}, maps[0], maps[1], gaps)
