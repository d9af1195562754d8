"""The conditions of a fleet, one function for each, made from a summary of its engines. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sglang_rollout.api.status import AvoidedNode, ConditionType, EnginePhase, Finding, Reason, find
from sglang_rollout.api.v1alpha1 import State
from sglang_rollout.controller.decide.elastic import is_held_for_base
from sglang_rollout.controller.decide.engine_status import (
    EngineReport,
    format_version,
    holds_trainer_memory,
    is_released_by_trainer,
    is_waiting_for_trainer,
)
from sglang_rollout.controller.decide.isolation import evaluate_isolation
from sglang_rollout.controller.decide.plan import Failure
from sglang_rollout.controller.decide.store import describe_store_problem, evaluate_store, has_store_failed
from sglang_rollout.controller.decide.view import FleetView
from sglang_rollout.controller.render import names
from sglang_rollout.wire.reasons import end_sentence
from sglang_rollout.wire.record import UpdateOutcome
from sglang_rollout.wire.states import FleetState

_NEEDS_ATTENTION = (
    Reason.IMAGE_PULL_FAILED,
    Reason.CREATE_FAILED,
    Reason.ENGINE_CRASHED,
    Reason.RESTART_BUDGET_EXHAUSTED,
    Reason.PLUGIN_MISSING,
    Reason.INSUFFICIENT_CAPACITY,
)
SEVERITY = (
    *_NEEDS_ATTENTION,
    Reason.WAITING_FOR_QUEUE,
    Reason.PODS_NOT_READY,
    Reason.ROUTER_NOT_READY,
    Reason.WEIGHTS_DIVERGED,
    Reason.WAITING_FOR_WEIGHTS,
    Reason.UPDATING_WEIGHTS,
    Reason.TRAINER_LOST,
    Reason.PAUSED,
    Reason.ASLEEP,
)
"""Of several engines that do not serve, a condition describes the engine whose reason comes first here."""
_RANKS = {reason: rank for rank, reason in enumerate(SEVERITY)}

_NORMAL_FOR_SURPLUS = frozenset({Reason.INSUFFICIENT_CAPACITY, Reason.WAITING_FOR_QUEUE, Reason.PODS_NOT_READY, Reason.WAITING_FOR_WEIGHTS})
"""Reasons that need no attention for a surplus engine."""
_WAITS_FOR_ROOM = frozenset({Reason.INSUFFICIENT_CAPACITY, Reason.WAITING_FOR_QUEUE})
"""Reasons that end when other workloads free room or quota."""
_INTERRUPTED = frozenset({Reason.TRAINER_LOST, Reason.PAUSED, Reason.ASLEEP})
"""Reasons of engines that the spec, a trainer or a lost trainer keeps from serving."""
_NOT_UP = frozenset({EnginePhase.PENDING, EnginePhase.STARTING, EnginePhase.STOPPING})


@dataclass(frozen=True)
class FleetSummary:
    """The facts that conditions need: the engines of a fleet by state, and what prevents progress."""

    fleet: FleetView
    reports: Sequence[EngineReport]
    """Reports on all engines."""
    failure: Failure | None = None
    """Why the plan could not be carried out."""
    avoided: Sequence[AvoidedNode] = ()
    """Nodes that engines must not use."""

    @cached_property
    def wanted(self) -> list[EngineReport]:
        """Wanted engines."""
        return [report for report in self.reports if report.engine.is_wanted]

    @cached_property
    def leaving_count(self) -> int:
        """Number of engines being removed."""
        return len(self.reports) - len(self.wanted)

    @cached_property
    def base_count(self) -> int:
        """Number of wanted engines in the base."""
        return sum(not report.engine.is_surplus for report in self.wanted)

    @cached_property
    def serving_count(self) -> int:
        """Number of wanted engines that serve."""
        return sum(report.status.phase is EnginePhase.SERVING for report in self.wanted)

    @cached_property
    def interrupted(self) -> list[EngineReport]:
        """Wanted engines that the spec, a trainer or a lost trainer keeps from serving."""
        return [report for report in self.wanted if report.reason in _INTERRUPTED]

    @cached_property
    def outdated(self) -> list[EngineReport]:
        """Wanted engines with a pod from an older spec."""
        return [report for report in self.wanted if report.engine.pods and not report.engine.is_up_to_date]

    @cached_property
    def away(self) -> list[EngineReport]:
        """Wanted engines that do not serve."""
        return [report for report in self.wanted if report.reason is not None]

    @cached_property
    def behind(self) -> list[EngineReport]:
        """Wanted engines that are up and wait for weights."""
        return [report for report in self.wanted if report.reason in {Reason.WEIGHTS_DIVERGED, Reason.WAITING_FOR_WEIGHTS}]

    @cached_property
    def coming(self) -> list[EngineReport]:
        """Wanted engines that are not up."""
        return [report for report in self.wanted if report.status.phase in _NOT_UP]

    @cached_property
    def waiting(self) -> list[EngineReport]:
        """Engines that wait for room, for quota, or until :attr:`obstacle` is resolved; the worst comes first."""
        pending = [report for report in self.coming if report.status.phase is EnginePhase.PENDING]
        found = [
            report for report in pending if self.obstacle or report.reason in _WAITS_FOR_ROOM or is_held_for_base(self.fleet, report.engine)
        ]
        return sorted(found, key=_severity)

    @cached_property
    def worst(self) -> EngineReport | None:
        """The engine to describe if not all serve. Surplus engines come and go, so only their failures are described."""
        away = [report for report in self.away if not report.engine.is_surplus or report.reason not in _NORMAL_FOR_SURPLUS]
        return min(away, key=_severity, default=None)

    @cached_property
    def obstacle(self) -> Failure | None:
        """Why the plan could not be carried out, or what the cluster lacks for an engine without a node."""
        cluster = self.fleet.cluster
        if self.failure or not any(report.status.phase is EnginePhase.PENDING for report in self.wanted):
            return self.failure
        if cluster.queue_problem:
            return Failure(Reason.QUEUE_NOT_FOUND, cluster.queue_problem)
        return Failure(Reason.GANG_NOT_POSSIBLE, cluster.gang_problem) if cluster.gang_problem else None

    @cached_property
    def router_problem(self) -> str:
        """Why the router does not run, as a sentence."""
        for pod in self.fleet.router_pods:
            if trouble := pod.find_trouble():
                return end_sentence(f"Router pod {pod.name}: {trouble.text}")
            if pod.scheduler_message:
                return end_sentence(f"Router pod {pod.name}: no node can take it: {pod.scheduler_message}")
            if pod.node is None:
                return f"Router pod {pod.name} waits for the scheduler."
        name, refusal = names.router_name(self.fleet.name), self.fleet.router_creation_error
        return end_sentence(f"The pod of Deployment {name} cannot be created: {refusal}") if refusal else "The router is starting."

    @cached_property
    def version_suffix(self) -> str:
        """The committed version as the end of a phrase; empty without a record."""
        return f" version {format_version(self.fleet.record.committed)}" if self.fleet.record else ""


def describe_invalid_spec(why: str) -> list[Finding]:
    """Return the conditions of an object that cannot be read."""
    message = f"The spec is invalid: {why} The operator changes nothing until the spec is valid."
    return [
        Finding(ConditionType.READY, "False", Reason.INVALID_SPEC, message),
        Finding(ConditionType.AVAILABLE, "Unknown", Reason.INVALID_SPEC, message),
        Finding(ConditionType.PROGRESSING, "False", Reason.INVALID_SPEC, message),
        Finding(ConditionType.DEGRADED, "True", Reason.INVALID_SPEC, message),
    ]


def describe_partial_commit(version: str, engines: int, reason: str) -> str:
    """Return the message about a version that some engines did not commit."""
    count = f"{engines} engine{'' if engines == 1 else 's'}"
    return end_sentence(f"Version {version} is committed on {count}; the other engines wait for weights: {reason}")


def evaluate_conditions(summary: FleetSummary) -> list[Finding]:
    """Return the status, reason and message of each condition."""
    store = evaluate_store(summary.fleet)
    return [
        _ready(summary),
        _available(summary),
        _progressing(summary),
        _router_ready(summary),
        *([store] if store else []),
        _weights_consistent(summary),
        _waiting_for_weights(summary),
        evaluate_isolation(summary.fleet),
        _degraded(summary),
    ]


def _severity(report: EngineReport) -> int:
    return _RANKS.get(report.reason, len(_RANKS)) if report.reason else len(_RANKS)


def _ready(summary: FleetSummary) -> Finding:
    def not_ready(reason: Reason, message: str) -> Finding:
        return Finding(ConditionType.READY, "False", reason, message)

    if summary.obstacle:
        return not_ready(summary.obstacle.reason, summary.obstacle.message)
    worst = summary.worst
    if worst and worst.reason in _NEEDS_ATTENTION:
        return not_ready(worst.reason, _describe_group(summary, worst))
    if not summary.fleet.is_router_ready:
        return not_ready(Reason.ROUTER_NOT_READY, summary.router_problem)
    if summary.outdated:
        return not_ready(Reason.UPDATING, _describe_rolling_update(summary))
    if worst and worst.reason and worst.reason not in _INTERRUPTED:
        return not_ready(worst.reason, _describe_group(summary, worst))
    interruption = _find_interruption(summary)
    return not_ready(*interruption) if interruption else _all_serve(summary)


def _find_interruption(summary: FleetSummary) -> tuple[Reason, str] | None:
    """Return what keeps engines from serving on purpose: the spec, a trainer, or a lost trainer."""
    fleet, count = summary.fleet, len(summary.interrupted)
    state = fleet.rollout.spec.state if fleet.rollout is not None and summary.wanted else State.ACTIVE
    engines = f"{count} of {len(summary.wanted)} engines"
    if state is State.ASLEEP:
        return Reason.ASLEEP, f"Asleep by spec.state: {engines} have released their memory. Kept:{summary.version_suffix}."
    if state is State.PAUSED:
        return Reason.PAUSED, f"Paused by spec.state: {engines} are paused and hold{summary.version_suffix}. Weight updates are accepted."
    if not count:
        return None
    if is_waiting_for_trainer(fleet):
        message = (
            f"The trainer is lost, and weights.trainerLease.onLoss is Pause: {engines} are paused and hold{summary.version_suffix}."
            " They resume when a trainer calls the fleet's URL; by hand: POST /continue_generation there."
        )
        return Reason.TRAINER_LOST, message
    if not is_released_by_trainer(fleet) and _was_interrupted_by_spec(fleet):
        return summary.interrupted[0].reason or Reason.PAUSED, f"spec.state is Active again: {engines} have not resumed yet."
    return Reason.ASLEEP_FOR_TRAINER, f"Asleep: the trainer {_describe_trainer_sleep(fleet, engines)}"


def _describe_trainer_sleep(fleet: FleetView, engines: str) -> str:
    if holds_trainer_memory(fleet):
        return f"uses the memory of {engines}. It wakes them by resume_memory_occupation."
    if is_released_by_trainer(fleet):
        return f"is waking the engines: {engines} do not have all of their memory back yet."
    return f"has released memory of {engines}. They serve when their memory is restored."


def _was_interrupted_by_spec(fleet: FleetView) -> bool:
    """Return True if engines come out of a pause or sleep by ``spec.state``.

    The alternative is a sleep that the trainer of a fleet with GPUs of its own requested. Once ``spec.state`` is Active, the
    record does not distinguish the two cases, but the reason of the last ``Ready`` does.
    """
    is_applied = fleet.record is not None and fleet.record.state is not FleetState.ACTIVE
    return is_applied or find(fleet.previous, ConditionType.READY).get("reason") == Reason.ASLEEP


def _all_serve(summary: FleetSummary) -> Finding:
    kind, rollout = ConditionType.READY, summary.fleet.rollout
    if summary.wanted and (problem := describe_store_problem(summary.fleet)):
        return Finding(kind, "False", Reason.STORE_NOT_READY, problem)
    if summary.wanted and not summary.away:
        return Finding(kind, "True", Reason.ALL_SERVING, f"{_describe_all(len(summary.wanted))}{summary.version_suffix}.")
    if summary.wanted:
        return Finding(kind, "True", Reason.BASE_SERVING, _describe_base(summary))
    if rollout is not None and rollout.spec.state is State.SUSPENDED:
        kept = f": no engine runs. Kept:{summary.version_suffix}." if summary.fleet.record else "."
        return Finding(kind, "False", Reason.SUSPENDED, f"Suspended by spec.state{kept}")
    return Finding(kind, "True", Reason.SCALED_TO_ZERO, "No engine is wanted (spec.replicas is 0).")


def _describe_all(number: int, which: str = "") -> str:
    return f"The engine{which} serves" if number == 1 else f"All {number} engines{which} serve"


def _describe_base(summary: FleetSummary) -> str:
    base, surplus = summary.base_count, len(summary.wanted) - summary.base_count
    of_surplus = f"{summary.serving_count - base} of {surplus} surplus engines"
    serving = f"{_describe_all(base, ' of the base')}{summary.version_suffix}, and {of_surplus}."
    return f"{serving} {_and_more(summary.away[0].sentence, len(summary.away), 'not serving either')}"


def _available(summary: FleetSummary) -> Finding:
    kind = ConditionType.AVAILABLE
    if summary.serving_count:
        message = f"{summary.serving_count} of {len(summary.wanted)} engines serve{summary.version_suffix}."
        return Finding(kind, "True", Reason.ENGINES_SERVING, message)
    message = "No engine serves: requests for tokens are answered with 503 and the reason."
    if not summary.fleet.is_router_ready:
        message = summary.router_problem
    elif is_waiting_for_trainer(summary.fleet):
        message = "No engine generates until a trainer calls: requests for tokens wait."
    return Finding(kind, "False", Reason.NO_ENGINE_SERVING, message)


def _progressing(summary: FleetSummary) -> Finding:
    kind, waiting, wanted = ConditionType.PROGRESSING, summary.waiting, len(summary.wanted)
    if summary.outdated:
        return Finding(kind, "True", Reason.UPDATING, _describe_rolling_update(summary))
    starting = len(summary.coming) - len(waiting)
    if starting or summary.leaving_count:
        parts = [
            f"{starting} of {wanted} engines are starting" if starting else "",
            f"{summary.leaving_count} engines are being removed" if summary.leaving_count else "",
            f"{len(waiting)} waiting" if waiting else "",
        ]
        return Finding(kind, "True", Reason.SCALING, "; ".join(part for part in parts if part) + ".")
    if waiting and summary.obstacle:
        return Finding(kind, "False", summary.obstacle.reason, summary.obstacle.message)
    if waiting:
        reason = waiting[0].reason or Reason.PODS_NOT_READY
        return Finding(kind, "False", reason, f"Waiting: {len(waiting)} of {wanted} engines. {_describe_group(summary, waiting[0])}")
    return Finding(kind, "False", Reason.SETTLED, "All objects are as the spec says.")


def _router_ready(summary: FleetSummary) -> Finding:
    if summary.fleet.is_router_ready:
        message = f"Deployment {names.router_name(summary.fleet.name)} runs."
        return Finding(ConditionType.ROUTER_READY, "True", Reason.ROUTER_RUNNING, message)
    return Finding(ConditionType.ROUTER_READY, "False", Reason.ROUTER_NOT_READY, summary.router_problem)


def _waiting_for_weights(summary: FleetSummary) -> Finding:
    kind, behind = ConditionType.WAITING_FOR_WEIGHTS, summary.behind
    if summary.fleet.record is None:
        return _not_reported(summary, kind)
    if not behind:
        return Finding(kind, "False", Reason.ALL_AT_COMMITTED, "No engine waits for weights.")
    return Finding(kind, "True", behind[0].reason or Reason.WAITING_FOR_WEIGHTS, _and_more(behind[0].sentence, len(behind)))


def _weights_consistent(summary: FleetSummary) -> Finding:
    kind, record = ConditionType.WEIGHTS_CONSISTENT, summary.fleet.record
    if record is None:
        return _not_reported(summary, kind)
    behind = [*summary.behind, *(report for report in summary.wanted if report.reason is Reason.UPDATING_WEIGHTS)]
    if behind:
        worst = min(behind, key=_severity)
        return Finding(kind, "False", worst.reason or Reason.WAITING_FOR_WEIGHTS, _and_more(worst.sentence, len(behind)))
    message = f"Every engine that is up holds version {format_version(record.committed)}."
    return Finding(kind, "True", Reason.ALL_AT_COMMITTED, message)


def _not_reported(summary: FleetSummary, kind: ConditionType) -> Finding:
    return Finding(kind, "Unknown", Reason.NOT_REPORTED, summary.fleet.record_problem or "The coordinator has not reported yet.")


def _degraded(summary: FleetSummary) -> Finding:
    kind, worst, fleet = ConditionType.DEGRADED, summary.worst, summary.fleet
    if summary.obstacle:
        return Finding(kind, "True", summary.obstacle.reason, summary.obstacle.message)
    if worst and worst.reason in _NEEDS_ATTENTION:
        return Finding(kind, "True", worst.reason, _describe_group(summary, worst))
    if not fleet.is_router_ready and (fleet.router_creation_error or any(pod.find_trouble() for pod in fleet.router_pods)):
        return Finding(kind, "True", Reason.ROUTER_NOT_READY, summary.router_problem)
    interruption = _find_interruption(summary)
    if interruption is not None and interruption[0] is Reason.TRAINER_LOST:
        return Finding(kind, "True", *interruption)
    checks = (_check_certificate, _check_callers, _check_store, _check_last_update, _check_nodes, _check_snapshots)
    if found := next(filter(None, (check(summary) for check in checks)), None):
        return Finding(kind, "True", *found)
    return Finding(kind, "False", Reason.AS_EXPECTED, "Nothing needs attention.")


def _check_certificate(summary: FleetSummary) -> tuple[Reason, str] | None:
    problem = summary.fleet.cluster.tls_problem
    return (Reason.INVALID_CERTIFICATE, f"The running router keeps its certificate. {problem}") if problem else None


def _check_callers(summary: FleetSummary) -> tuple[Reason, str] | None:
    record = summary.fleet.record
    if record is None or not record.callers_forbidden:
        return None
    message = (
        "spec.security selects callers of other namespaces, and the coordinator may not watch their pods, so that they are refused:"
        f" bind the chart's ClusterRole for callers to ServiceAccount {names.router_name(summary.fleet.name)}, or select callers of this"
        " namespace only."
    )
    return Reason.NOT_ALLOWED, message


def _check_store(summary: FleetSummary) -> tuple[Reason, str] | None:
    fleet = summary.fleet
    return (Reason.STORE_NOT_READY, describe_store_problem(fleet)) if has_store_failed(fleet) else None


def _check_snapshots(summary: FleetSummary) -> tuple[Reason, str] | None:
    problem = summary.fleet.record.snapshot_problem if summary.fleet.record else ""
    return (Reason.SNAPSHOT_FAILED, problem) if problem else None


def _check_last_update(summary: FleetSummary) -> tuple[Reason, str] | None:
    last = summary.fleet.record.last_update if summary.fleet.record else None
    if last and last.outcome is UpdateOutcome.PARTIAL and summary.away:
        message = describe_partial_commit(format_version(last.version), len(last.engines), last.message)
        return Reason.PARTLY_COMMITTED, message
    if last and last.outcome is UpdateOutcome.FAILED:
        message = (
            f"The last weight update (to {format_version(last.version)}) ended {last.outcome.value}: {last.message or 'no reason given'}"
        )
        return Reason.UPDATE_FAILED, end_sentence(message)
    return None


def _check_nodes(summary: FleetSummary) -> tuple[Reason, str] | None:
    """Report avoided nodes, which may need repair even if the fleet runs without them."""
    message = " ".join(f"Node {row.node} is avoided until {row.until}: {row.message}" for row in summary.avoided)
    return (Reason.NODES_AVOIDED, message) if message else None


def _describe_group(summary: FleetSummary, worst: EngineReport) -> str:
    return _and_more(worst.sentence, sum(report.reason == worst.reason for report in summary.wanted))


def _and_more(text: str, count: int, what: str = "for the same reason") -> str:
    others = count - 1
    return text if others < 1 else f"{text} ({others} more engine{'s' if others > 1 else ''} {what}.)"


def _describe_rolling_update(summary: FleetSummary) -> str:
    updated = len(summary.wanted) - len(summary.outdated)
    progress = f"Rolling update: {updated} of {len(summary.wanted)} engines are made from the current spec."
    waiting = next((report for report in summary.wanted if report.status.updated and report.reason is not None), None)
    return f"{progress} The next engine waits for this: {waiting.sentence}" if waiting else progress
