"""What to report about a fleet: a pure function of what was observed. Says why, as a constant and as a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_rollout.api.conditions import conditions
from sglang_rollout.api.status import (
    MAX_ADAPTER_NAME,
    MAX_ADAPTER_PATH,
    MAX_ADAPTERS,
    MAX_ENGINE_ROWS,
    AdapterStatus,
    Endpoints,
    EnginePhase,
    EngineStatus,
    LastUpdate,
    RolloutStatus,
    WeightsStatus,
)
from sglang_rollout.controller.decide.conditions import findings, invalid_findings
from sglang_rollout.controller.decide.engine_status import EngineView, engine_views, version_text
from sglang_rollout.controller.decide.facts import Facts, Failure
from sglang_rollout.controller.decide.node_avoidance import avoidance
from sglang_rollout.controller.decide.prefetch import prefetch_status
from sglang_rollout.controller.decide.view import World
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.settings import Settings
from sglang_rollout.wire.ports import FLEET, FRONT_PORT
from sglang_rollout.wire.record import EngineRow, Record
from sglang_rollout.wire.weights import EngineState, Version

_LONGEST_MESSAGE = 2000


def build_status(world: World, settings: Settings, now: str, failure: Failure | None = None) -> dict[str, Any]:
    """Return the complete status.

    ``now`` (RFC 3339) is used only for the ``lastTransitionTime`` of conditions whose status changed and for nodes that are
    avoided, so that an unchanged fleet has an unchanged status. ``failure`` is why the plan could not be carried out.
    """
    del settings  # nothing the operator was started with is reported; the parameter keeps the signature beside plan()
    metadata = world.cr["metadata"]
    previous = (world.cr.get("status") or {}).get("conditions") or []
    generation = int(metadata.get("generation", 0))
    if world.rollout is None:
        found = invalid_findings(world.invalid)
        made = conditions(found, previous, generation=generation, now=now)
        return _dump(RolloutStatus(observed_generation=generation, selector=names.selector_string(metadata["name"]), conditions=made))
    views = engine_views(world)
    nodes = avoidance(world, now)
    facts = Facts.of(world, views, failure, nodes.nodes)
    return _dump(
        RolloutStatus(
            observed_generation=generation,
            replicas=len(world.engines()),
            ready_replicas=facts.serving,
            updated_replicas=sum(view.row.updated for view in facts.wanted),
            ready=f"{facts.serving}/{world.rollout.spec.engines}",
            base=world.rollout.spec.base if world.rollout.spec.elastic else None,
            selector=names.selector_string(metadata["name"], pods=world.rollout.spec.engine.pods),
            conditions=conditions(findings(facts), previous, generation=generation, now=now),
            engines=_rows(views),
            weights=_weights(world),
            adapters=_adapters(world),
            avoided_nodes=list(nodes.nodes) or None,
            node_failures=list(nodes.failures) or None,
            prefetch=prefetch_status(world),
            endpoints=_endpoints(world),
        )
    )


def _dump(status: RolloutStatus) -> dict[str, Any]:
    made = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    for condition in made["conditions"]:
        condition["message"] = condition["message"][:_LONGEST_MESSAGE]
    return made


def _rows(views: Sequence[EngineView]) -> list[EngineStatus]:
    """Bounded; in a big fleet those that need attention come first."""
    rows = [view.row for view in views]
    if len(rows) > MAX_ENGINE_ROWS:
        rows.sort(key=lambda row: row.phase is EnginePhase.SERVING)
    return rows[:MAX_ENGINE_ROWS]


def _weights(world: World) -> WeightsStatus | None:
    record = world.record
    if record is None:
        return None
    last = record.last_update
    serving = sorted({(row.version.run, row.version.step): row.version for row in record.engines if row.gate_open and row.version}.items())
    return WeightsStatus(
        committed_version=version_text(record.committed),
        run=record.committed.run,
        step=record.committed.step,
        epoch=record.epoch,
        world_size=record.world_size,
        oldest_serving=version_text(serving[0][1]) if serving else None,
        newest_serving=version_text(serving[-1][1]) if serving else None,
        skew=_behind(record, serving[0][1]) if serving else 0,
        stale=sum(row.boot_id is not None and not _holds(record, row) for row in record.engines),
        last_update=None
        if last is None
        else LastUpdate(
            version=version_text(last.version),
            outcome=last.outcome.value,
            reason=last.reason,
            finished=last.finished,
            phases_ms=last.phases_ms,
            engines=len(last.engines),
        ),
    )


def _adapters(world: World) -> list[AdapterStatus]:
    """Clipped: a record may hold what status has no room for, and each row needs a name of its own."""
    rows = {row.name[:MAX_ADAPTER_NAME]: row for row in reversed(world.record.adapters)} if world.record is not None else {}
    return [
        AdapterStatus(
            name=name,
            path=row.path[:MAX_ADAPTER_PATH],
            loaded=row.loaded,
            wanted=row.wanted,
            reason=row.reason[:_LONGEST_MESSAGE],
        )
        for name, row in list(reversed(rows.items()))[:MAX_ADAPTERS]
    ]


def _behind(record: Record, version: Version) -> int:
    """How many commits of those that may be served came after ``version``."""
    return sum((newer.run, newer.step) > (version.run, version.step) for newer in record.history)


def _holds(record: Record, row: EngineRow) -> bool:
    held = row.version if row.state is EngineState.CLEAN else None
    return held is not None and (held.run, held.step) == (record.committed.run, record.committed.step)


def _endpoints(world: World) -> Endpoints:
    metadata = world.cr["metadata"]
    url = names.public_url(metadata["name"], metadata.get("namespace", "default"), FRONT_PORT)
    return Endpoints(url=url, discovery=url + FLEET)
