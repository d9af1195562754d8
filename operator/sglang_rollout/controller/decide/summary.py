"""What the conditions of a fleet need: its engines by state, and what keeps them from serving. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sglang_rollout.api.status import AvoidedNode, ConditionType, EnginePhase, Reason, find
from sglang_rollout.api.v1alpha1 import State
from sglang_rollout.controller.decide.elastic import is_held_for_base
from sglang_rollout.controller.decide.engine_status import (
    EngineReport,
    format_version,
    holds_trainer_memory,
    is_released_by_trainer,
    is_waiting_for_trainer,
)
from sglang_rollout.controller.decide.plan import Failure
from sglang_rollout.controller.decide.view import FleetView
from sglang_rollout.controller.render import names
from sglang_rollout.wire.reasons import end_sentence
from sglang_rollout.wire.states import FleetState

NEEDS_ATTENTION = (
    Reason.IMAGE_PULL_FAILED,
    Reason.CREATE_FAILED,
    Reason.ENGINE_CRASHED,
    Reason.RESTART_BUDGET_EXHAUSTED,
    Reason.PLUGIN_MISSING,
    Reason.CLAIM_UNAVAILABLE,
    Reason.INSUFFICIENT_CAPACITY,
)
SEVERITY = (
    *NEEDS_ATTENTION,
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
INTERRUPTED = frozenset({Reason.TRAINER_LOST, Reason.PAUSED, Reason.ASLEEP})
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
    now: str = ""
    """Time (RFC 3339). Empty: fights about children are not reported."""

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
    def stepping(self) -> list[EngineReport]:
        """Wanted engines that a training step keeps from serving: a weight update, or the trainer's use of their memory.

        They serve again without help. Engines that were lost before the update are not among them, because the update may fail.
        """
        asleep = self.interruption is not None and self.interruption[0] is Reason.ASLEEP_FOR_TRAINER
        return [report for report in self.wanted if (report.is_updating and not report.status.lost) or (report.is_asleep and asleep)]

    @cached_property
    def working_count(self) -> int:
        """Number of wanted engines that serve, or that only a training step keeps from serving."""
        return self.serving_count + len(self.stepping)

    @cached_property
    def interrupted(self) -> list[EngineReport]:
        """Wanted engines that the spec, a trainer or a lost trainer keeps from serving."""
        return [report for report in self.wanted if report.reason in INTERRUPTED]

    @cached_property
    def outdated(self) -> list[EngineReport]:
        """Wanted engines with a pod from an older spec."""
        return [report for report in self.wanted if report.engine.pods and not report.engine.is_up_to_date]

    @cached_property
    def away(self) -> list[EngineReport]:
        """Wanted engines that do not serve, except those in a training step."""
        return [report for report in self.wanted if report.reason is not None and report not in self.stepping]

    @cached_property
    def interruption(self) -> tuple[Reason, str] | None:
        """What keeps engines from serving on purpose: the spec, a trainer, or a lost trainer."""
        return _find_interruption(self)

    @cached_property
    def update_progress(self) -> str:
        """The open weight update as a sentence; empty if none is open."""
        record, updating = self.fleet.record, sum(report.is_updating for report in self.wanted)
        version = f" to {format_version(record.under_way)}" if record is not None and record.under_way is not None else ""
        engines = f"{updating} of {len(self.wanted)} engines serve again when it ends." if updating else "The engines serve meanwhile."
        return f"A weight update{version} is in progress. {engines}" if version or updating else ""

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
        return sorted(found, key=rank_severity)

    @cached_property
    def worst(self) -> EngineReport | None:
        """The engine to describe if not all serve. Surplus engines come and go, so only their failures are described."""
        away = [report for report in self.away if not report.engine.is_surplus or report.reason not in _NORMAL_FOR_SURPLUS]
        return min(away, key=rank_severity, default=None)

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


def rank_severity(report: EngineReport) -> int:
    """Return the rank of the engine's reason in ``SEVERITY``: the worst is 0."""
    return _RANKS.get(report.reason, len(_RANKS)) if report.reason else len(_RANKS)


def _find_interruption(summary: FleetSummary) -> tuple[Reason, str] | None:
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
