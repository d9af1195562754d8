"""Phase of one engine and, if it does not serve, why. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from sglang_rollout.api.status import EnginePhase, EngineStatus, Reason
from sglang_rollout.controller.decide.elastic import is_held_for_base
from sglang_rollout.controller.decide.pods import Pod, TroubleKind
from sglang_rollout.controller.decide.prerequisites import explain_missing_node
from sglang_rollout.controller.decide.view import EngineView, FleetView
from sglang_rollout.wire.ports import GATE_PORT
from sglang_rollout.wire.reasons import GateReason, begin_sentence, end_sentence
from sglang_rollout.wire.record import EngineRow
from sglang_rollout.wire.states import BASE_LABEL, EngineState, FleetState, Version

_WORST_FIRST = (EnginePhase.FAILED, EnginePhase.PENDING, EnginePhase.STARTING)
"""Of several pods of an engine, the status describes the pod whose phase comes first here."""
_CLAIM = re.compile(
    r"(persistentvolumeclaim|resourceclaim) \"[^\"]*\" (not found|is being deleted)|unbound immediate PersistentVolumeClaims"
)
"""Kubernetes' own text, which has no reason code for a claim."""
_INTERRUPTIONS = frozenset({Reason.UPDATING_WEIGHTS, Reason.TRAINER_LOST, Reason.PAUSED, Reason.ASLEEP, Reason.ROUTER_NOT_READY})
"""Reasons that do not show whether the engine was lost before. The row keeps its last answer (``lost``)."""
_GATE_VERDICTS: Mapping[GateReason, tuple[EnginePhase, Reason]] = {
    GateReason.RESTART_BUDGET_EXHAUSTED: (EnginePhase.FAILED, Reason.RESTART_BUDGET_EXHAUSTED),
    GateReason.CATCHING_UP: (EnginePhase.WAITING, Reason.WAITING_FOR_WEIGHTS),
    GateReason.PLUGIN_MISSING: (EnginePhase.FAILED, Reason.PLUGIN_MISSING),
}
"""Phase and reason of an engine whose agent or coordinator gives one of these codes. Other codes do not decide by themselves."""
_OPENS_SOON = frozenset({GateReason.NOT_COMMITTED, GateReason.UPDATE_IN_PROGRESS, GateReason.GATE_NOT_READY})
"""Codes of an engine that holds the committed version: its agent has not heard of the commit yet, or haproxy is opening the gate."""
_TROUBLE_REASONS = {
    TroubleKind.IMAGE: Reason.IMAGE_PULL_FAILED,
    TroubleKind.CRASH: Reason.ENGINE_CRASHED,
    TroubleKind.CREATE: Reason.CREATE_FAILED,
}


@dataclass(frozen=True)
class Verdict:
    """Phase of an engine, and why the engine does not serve."""

    phase: EnginePhase
    reason: Reason | None
    """Reason in the row of the engine; None if it serves."""
    message: str
    """A sentence that begins with "it"; empty if the engine serves."""


SERVING = Verdict(EnginePhase.SERVING, None, "")


@dataclass(frozen=True)
class EngineReport:
    """What the status says about one engine."""

    engine: EngineView
    status: EngineStatus
    """Row of ``status.engines``."""
    reason: Reason | None
    """Reason that the engine adds to the condition ``Ready``; None if it serves or is being removed."""

    @property
    def is_updating(self) -> bool:
        """True if a weight update keeps the engine from serving."""
        return self.reason is Reason.UPDATING_WEIGHTS

    @property
    def is_asleep(self) -> bool:
        """True if the engine is up and released memory keeps it from serving."""
        return self.reason is Reason.ASLEEP

    @property
    def sentence(self) -> str:
        """Why the engine does not serve, naming it."""
        return f"Engine {self.engine.name}: {self.status.message}" if self.status.message else f"Engine {self.engine.name} serves."


def format_version(version: Version) -> str:
    """Return how a version is shown: ``base``, or the trainer's label."""
    return BASE_LABEL if version.is_base else version.label or str(version)


def report_engines(fleet: FleetView) -> list[EngineReport]:
    """Return a report on each engine: wanted engines, then those being removed."""
    return [_report_wanted(fleet, engine) if engine.is_wanted else _report_leaving(engine) for engine in fleet.engines]


def is_waiting_for_trainer(fleet: FleetView) -> bool:
    """Return True if the fleet is paused until a trainer calls, because its trainer was lost (``weights.trainerLease.onLoss``)."""
    return fleet.record is not None and fleet.record.waits_for_trainer


def is_released_by_trainer(fleet: FleetView) -> bool:
    """Return True if engines sleep for the trainer on the same GPUs, and not by ``spec.state``."""
    return fleet.record is not None and fleet.record.state is not FleetState.ASLEEP and fleet.record.released_to_trainer is not None


def holds_trainer_memory(fleet: FleetView) -> bool:
    """Return True if the trainer on the same GPUs still uses memory of engines. If not, sleeping engines are waking up."""
    return is_released_by_trainer(fleet) and fleet.record is not None and fleet.record.has_released_memory


def _report_wanted(fleet: FleetView, engine: EngineView) -> EngineReport:
    verdict = _judge(fleet, engine)
    lost = engine.previous.get("lost") if verdict.reason in _INTERRUPTIONS else (verdict.reason is not None or None)
    return EngineReport(engine, _build_row(engine, verdict, lost=lost), verdict.reason)


def _report_leaving(engine: EngineView) -> EngineReport:
    verdict = Verdict(EnginePhase.STOPPING, Reason.SCALED_DOWN, "it is not wanted any more and is being removed.")
    return EngineReport(engine, _build_row(engine, verdict), None)


def _build_row(engine: EngineView, verdict: Verdict, *, lost: bool | None = None) -> EngineStatus:
    row, head = engine.row, engine.head_pod
    port = head.gate_port if head else None
    return EngineStatus(
        name=engine.name,
        phase=verdict.phase,
        updated=engine.is_up_to_date,
        version=format_version(row.version) if row and row.version else None,
        weights=row.state.value if row else None,
        restarts=sum(pod.engine_restarts for pod in engine.pods),
        node=head.node if head else None,
        port=None if port == GATE_PORT else port,
        nodes=[pod.node or "" for pod in engine.pods] if len(engine.pods) > 1 else None,
        reason=verdict.reason.value if verdict.reason else "",
        message=verdict.message,
        lost=lost,
    )


def _judge(fleet: FleetView, engine: EngineView) -> Verdict:
    if engine.is_serving and is_waiting_for_trainer(fleet):
        message = "its trainer is lost (weights.trainerLease.onLoss); it resumes when a trainer calls."
        return Verdict(EnginePhase.PAUSED, Reason.TRAINER_LOST, message)
    if engine.is_serving:
        return SERVING
    if verdict := _judge_creation_error(engine):
        return verdict
    return _judge_several_pods(fleet, engine) if engine.size > 1 else _judge_one_pod(fleet, engine)


def _judge_one_pod(fleet: FleetView, engine: EngineView) -> Verdict:
    pod = engine.head_pod
    if pod is None:
        message = "it is created when every engine of the base has a node." if is_held_for_base(fleet, engine) else "it has no pod yet."
        return Verdict(EnginePhase.PENDING, Reason.PODS_NOT_READY, message)
    if pod.is_terminating:
        return Verdict(EnginePhase.STOPPING, Reason.PODS_NOT_READY, "its pod is being deleted and will be recreated.")
    return _judge_gate(fleet, engine) if pod.is_ready else _judge_pod(fleet, engine, pod)


def _judge_creation_error(engine: EngineView) -> Verdict | None:
    """Return the verdict on an engine whose pods the StatefulSet controller cannot create."""
    if not engine.creation_error or not engine.lacks_pods:
        return None
    message = end_sentence(f"its pods cannot be created: {engine.creation_error}")
    # Kubernetes' own text: a quota has no reason code.
    if "exceeded quota" in engine.creation_error and engine.is_surplus:
        return Verdict(EnginePhase.PENDING, Reason.INSUFFICIENT_CAPACITY, message)
    return Verdict(EnginePhase.FAILED, Reason.CREATE_FAILED, message)


def _judge_several_pods(fleet: FleetView, engine: EngineView) -> Verdict:
    """Return what the agents of an engine with several pods report, or the verdict on its worst pod."""
    pods, row = engine.pods, engine.row
    report = end_sentence(row.message) if row is not None and row.message else ""
    if row is not None and row.reason is GateReason.RESTART_BUDGET_EXHAUSTED:
        return Verdict(*_GATE_VERDICTS[row.reason], report)
    if leaving := next((pod for pod in pods if pod.is_terminating), None):
        message = f"its {leaving.label} is being deleted; the engine restarts with all its pods."
        return Verdict(EnginePhase.STOPPING, Reason.PODS_NOT_READY, message)
    if len(pods) < engine.size:
        return Verdict(EnginePhase.PENDING, Reason.PODS_NOT_READY, f"it has {len(pods)} of {engine.size} pods yet.")
    away = [(pod, _judge_pod(fleet, engine, pod)) for pod in pods if not pod.is_ready]
    if not away:
        return _judge_gate(fleet, engine)
    pod, verdict = min(away, key=lambda found: (_WORST_FIRST.index(found[1].phase), _follows_other_pod(found[0])))
    message = f"{verdict.message} {begin_sentence(report)}".rstrip() if verdict.phase is EnginePhase.STARTING else verdict.message
    return Verdict(verdict.phase, verdict.reason, f"{pod.label}: {message}")


def _follows_other_pod(pod: Pod) -> bool:
    trouble = pod.find_trouble()
    return trouble is not None and trouble.follows_other_pod


def _judge_pod(fleet: FleetView, engine: EngineView, pod: Pod) -> Verdict:
    """Return why a pod is not ready."""
    trouble = pod.find_trouble(failed_before=engine.previous.get("phase") == EnginePhase.FAILED)
    if trouble and trouble.kind in _TROUBLE_REASONS:
        return Verdict(EnginePhase.FAILED, _TROUBLE_REASONS[trouble.kind], end_sentence(trouble.text))
    if fleet.rollout and (found := explain_missing_node(pod, fleet.cluster, fleet.rollout)):
        return Verdict(EnginePhase.PENDING, *found)
    if pod.scheduler_message:
        return _judge_unschedulable(fleet, pod.scheduler_message)
    if trouble:
        return Verdict(EnginePhase.STARTING, Reason.PODS_NOT_READY, f"{trouble.text}; it is starting again.")
    if pod.node is None:
        return Verdict(EnginePhase.PENDING, Reason.PODS_NOT_READY, "its pod waits for the scheduler.")
    return Verdict(EnginePhase.STARTING, Reason.PODS_NOT_READY, f"it is starting.{_describe_download(fleet, pod)}")


def _describe_download(fleet: FleetView, pod: Pod) -> str:
    """Return an addition to a message: the pod downloads the model to the disk of its node, which may take long or be too small."""
    if fleet.rollout is None or not pod.download_limit:
        return ""
    return (
        f" Its pod downloads {fleet.rollout.spec.model.path} to the disk of its node (ephemeral storage, at most {pod.download_limit}), as"
        " each new pod does; model.volume with model.download keeps the files."
    )


def _judge_unschedulable(fleet: FleetView, message: str) -> Verdict:
    if _CLAIM.search(message):
        return Verdict(EnginePhase.PENDING, Reason.CLAIM_UNAVAILABLE, end_sentence(f"its pod waits for a claim: {message}"))
    text = end_sentence(f"no node can take its pod: {message}") + _list_avoided_nodes(fleet)
    return Verdict(EnginePhase.PENDING, Reason.INSUFFICIENT_CAPACITY, text)


def _list_avoided_nodes(fleet: FleetView) -> str:
    """Return an addition to the scheduler's message, which mentions an affinity that the user did not write."""
    nodes = fleet.avoided_nodes
    return f" Avoided because engines failed there (status.avoidedNodes): {', '.join(nodes)}." if nodes else ""


def _judge_gate(fleet: FleetView, engine: EngineView) -> Verdict:
    """Return why the gate of a ready engine is closed."""
    row = engine.row
    if not fleet.is_router_ready:
        return Verdict(EnginePhase.WAITING, Reason.ROUTER_NOT_READY, "it is up; the router is not.")
    if row is None:
        return _wait_for_weights("it is up; the coordinator has not reported on it yet.")
    return _judge_interruption(fleet, engine, row) or _judge_weights(fleet, engine, row)


def _judge_interruption(fleet: FleetView, engine: EngineView, row: EngineRow) -> Verdict | None:
    """Return the verdict on an engine that serves again without help; None if it needs weights."""
    if row.reason in (GateReason.CATCHING_UP, GateReason.PLUGIN_MISSING):
        return Verdict(*_GATE_VERDICTS[row.reason], row.message)
    if engine.holds_committed and row.reason in _OPENS_SOON:
        message = "it holds the version that was just committed; its gate is opening."
        return Verdict(EnginePhase.UPDATING, Reason.UPDATING_WEIGHTS, message)
    if row.reason is GateReason.UPDATE_IN_PROGRESS or _has_loaded_early(fleet, row):
        message = "a weight update is in progress; the engine serves again when it is committed."
        return Verdict(EnginePhase.UPDATING, Reason.UPDATING_WEIGHTS, message)
    if row.released or row.comparing:
        return Verdict(EnginePhase.ASLEEP, Reason.ASLEEP, _describe_sleep(fleet, row))
    if engine.is_paused_by_spec:
        return Verdict(EnginePhase.PAUSED, Reason.PAUSED, "spec.state is Paused; it holds the committed version.")
    return None


def _has_loaded_early(fleet: FleetView, row: EngineRow) -> bool:
    """Return True if the engine is the canary: it holds the version of the open update, which is not committed yet."""
    return row.reason is GateReason.NOT_COMMITTED and fleet.record is not None and row.version == fleet.record.under_way is not None


def _judge_weights(fleet: FleetView, engine: EngineView, row: EngineRow) -> Verdict:
    """Return the verdict on an engine whose weights keep its gate closed."""
    repeats = row.state is EngineState.DIRTY and row.reason is GateReason.DIRTY
    report = f" {end_sentence(begin_sentence(row.message))}" if row.message and not repeats else ""
    if row.state is EngineState.DIRTY:
        message = f"it holds part of an unfinished weight update and waits for a complete one.{report}"
        return Verdict(EnginePhase.WAITING, Reason.WEIGHTS_DIVERGED, message)
    if row.state is EngineState.CLEAN and row.version and fleet.record and not engine.holds_committed:
        held, committed = format_version(row.version), format_version(fleet.record.committed)
        return _wait_for_weights(f"it holds version {held}, the fleet serves {committed}: {_describe_way_back(fleet, engine)}")
    return _wait_for_weights(f"its gate is closed.{report}")


def _wait_for_weights(message: str) -> Verdict:
    return Verdict(EnginePhase.WAITING, Reason.WAITING_FOR_WEIGHTS, message)


def _describe_sleep(fleet: FleetView, row: EngineRow) -> str:
    """Return why an engine's memory is released, or how far the engine has woken up."""
    if not row.released:
        return "its memory is restored, and its weights are being compared with the weights that it held before."
    if fleet.record is not None and fleet.record.state is FleetState.ASLEEP:
        cause = "spec.state is Asleep"
    elif holds_trainer_memory(fleet):
        cause = "the trainer uses its memory"
    elif is_released_by_trainer(fleet):
        cause = "the trainer is waking it up"
    else:
        cause = "it serves when its memory is restored"
    return f"{cause}; released: {', '.join(row.released)}."


def _describe_way_back(fleet: FleetView, engine: EngineView) -> str:
    """Return how an engine with other weights can serve again."""
    record = fleet.record
    if fleet.rollout is not None and fleet.rollout.spec.weights.is_staged:
        return "it loads a staged copy, or takes the trainer's next weight update."
    if record and record.joined and engine.name not in fleet.process_group_members:
        return (
            "it joined after the trainer's process group was opened; it needs a new process group, or a snapshot on disk"
            " (weights.catchUp.disk)."
        )
    return "it waits for the trainer's next weight update."
