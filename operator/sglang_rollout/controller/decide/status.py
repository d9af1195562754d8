"""Build the complete status of a rollout from what was observed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_rollout.api.status import (
    MAX_ADAPTER_NAME,
    MAX_ADAPTER_PATH,
    MAX_ADAPTERS,
    MAX_AUTHOR,
    MAX_ENGINE_ROWS,
    AdapterStatus,
    Endpoints,
    EnginePhase,
    EngineStatus,
    LastUpdate,
    ProcessGroupFailure,
    Reason,
    RecentUpdate,
    RolloutStatus,
    WeightsStatus,
    conditions,
)
from sglang_rollout.controller.decide.conditions import describe_invalid_spec, evaluate_conditions
from sglang_rollout.controller.decide.engine_status import EngineReport, format_version, report_engines
from sglang_rollout.controller.decide.node_avoidance import decide_avoidance
from sglang_rollout.controller.decide.plan import Failure
from sglang_rollout.controller.decide.summary import FleetSummary
from sglang_rollout.controller.decide.view import FleetView, holds_committed
from sglang_rollout.controller.render import names
from sglang_rollout.wire.ports import FLEET
from sglang_rollout.wire.record import EndedUpdate, Record
from sglang_rollout.wire.states import Version

_MAX_MESSAGE_CHARACTERS = 2000


def build_status(fleet: FleetView, now: str, failure: Failure | None = None) -> dict[str, Any]:
    """Return the complete status.

    Args:
        fleet: The view of the rollout.
        now: Time (RFC 3339) for avoided nodes and for the ``lastTransitionTime`` of conditions whose status changed. The status
            of an unchanged fleet stays the same.
        failure: Why the plan could not be carried out.
    """
    generation = int(fleet.cr["metadata"].get("generation", 0))
    rollout, previous = fleet.rollout, fleet.previous.get("conditions") or []
    if rollout is None:
        found = conditions(describe_invalid_spec(fleet.invalid), previous, generation=generation, now=now)
        return _dump(RolloutStatus(observed_generation=generation, selector=names.selector_string(fleet.name), conditions=found))
    reports, nodes = report_engines(fleet), decide_avoidance(fleet, now)
    summary = FleetSummary(fleet, reports, failure, nodes.nodes, now)
    return _dump(
        RolloutStatus(
            observed_generation=generation,
            replicas=len(fleet.existing),
            ready_replicas=summary.working_count,
            updated_replicas=sum(report.status.updated for report in summary.wanted),
            ready=f"{summary.working_count}/{rollout.spec.engines}",
            base=rollout.spec.base if rollout.spec.elastic else None,
            selector=names.selector_string(fleet.name, pods=rollout.spec.engine.pods),
            conditions=conditions(evaluate_conditions(summary), previous, generation=generation, now=now),
            engines=_select_rows(reports),
            weights=_build_weights(summary),
            adapters=_build_adapters(fleet),
            avoided_nodes=list(nodes.nodes) or None,
            node_failures=list(nodes.failures) or None,
            endpoints=_build_endpoints(fleet),
        )
    )


def _dump(status: RolloutStatus) -> dict[str, Any]:
    dumped = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    for condition in dumped["conditions"]:
        condition["message"] = condition["message"][:_MAX_MESSAGE_CHARACTERS]
    return dumped


def _select_rows(reports: Sequence[EngineReport]) -> list[EngineStatus]:
    """Return at most ``MAX_ENGINE_ROWS`` rows; of a larger fleet, engines that do not serve come first."""
    rows = [report.status for report in reports]
    if len(rows) > MAX_ENGINE_ROWS:
        rows.sort(key=lambda row: row.phase is EnginePhase.SERVING)
    return rows[:MAX_ENGINE_ROWS]


def _build_weights(summary: FleetSummary) -> WeightsStatus | None:
    record = summary.fleet.record
    if record is None:
        return None
    stepping = {report.engine.name for report in summary.stepping}
    last, failure = record.last_update, record.group_failure
    serving = sorted({(row.version.run, row.version.step): row.version for row in record.engines if row.gate_open and row.version}.items())
    return WeightsStatus(
        committed_version=format_version(record.committed),
        author=record.author[:MAX_AUTHOR] or None,
        run=record.committed.run,
        step=record.committed.step,
        epoch=record.epoch,
        world_size=record.world_size,
        oldest_serving=format_version(serving[0][1]) if serving else None,
        newest_serving=format_version(serving[-1][1]) if serving else None,
        skew=_count_newer(record, serving[0][1]) if serving else 0,
        stale=sum(row.boot_id is not None and row.name not in stepping and not holds_committed(record, row) for row in record.engines),
        process_group_failure=ProcessGroupFailure(reason=failure.code, message=failure.message) if failure is not None else None,
        last_update=_build_last_update(last) if last is not None else None,
        recent_updates=[build_recent_update(update) for update in record.recent_updates] or None,
    )


def _build_last_update(last: EndedUpdate) -> LastUpdate:
    return LastUpdate(
        version=format_version(last.version),
        outcome=last.outcome.value,
        message=last.message,
        finished=last.finished,
        phases_ms=last.phases_ms,
        engines=len(last.engines),
        author=last.author[:MAX_AUTHOR],
        unchecked=last.unchecked,
    )


def build_recent_update(update: EndedUpdate) -> RecentUpdate:
    """Return the row of an update in ``status.weights.recentUpdates``."""
    return RecentUpdate(
        version=format_version(update.version),
        author=update.author[:MAX_AUTHOR],
        outcome=update.outcome.value,
        finished=update.finished,
        milliseconds=update.phases_ms.get("total"),
        bytes=update.bytes,
        reason=update.reason.value if update.reason is not None else "",
        message=update.shortened().message,
    )


def _build_adapters(fleet: FleetView) -> list[AdapterStatus]:
    """Return the adapters, shortened to the limits of the status. Rows have unique names."""
    rows = {row.name[:MAX_ADAPTER_NAME]: row for row in reversed(fleet.record.adapters)} if fleet.record is not None else {}
    return [
        AdapterStatus(
            name=name,
            path=row.path[:MAX_ADAPTER_PATH],
            loaded=row.loaded,
            wanted=row.wanted,
            reason=Reason.ADAPTER_FAILED.value if row.message else "",
            message=row.message[:_MAX_MESSAGE_CHARACTERS],
        )
        for name, row in list(reversed(rows.items()))[:MAX_ADAPTERS]
    ]


def _count_newer(record: Record, version: Version) -> int:
    """Return how many servable versions were committed after ``version``."""
    return sum((newer.run, newer.step) > (version.run, version.step) for newer in record.history)


def _build_endpoints(fleet: FleetView) -> Endpoints:
    namespace = fleet.cr["metadata"].get("namespace", "default")
    url = names.public_url(fleet.name, namespace, tls=fleet.is_encrypted)
    return Endpoints(url=url, generate=names.generate_url(fleet.name, namespace, tls=fleet.is_encrypted), discovery=url + FLEET)
