"""The weight store of a rollout with transport Staged: is it ready, is it in use, and may its pod be replaced? Pure."""

from __future__ import annotations

from sglang_rollout.api.status import ConditionType, Finding, Reason, Status
from sglang_rollout.controller.decide.engine_status import format_version
from sglang_rollout.controller.decide.pods import Pod, TroubleKind
from sglang_rollout.controller.decide.times import seconds_since
from sglang_rollout.controller.decide.view import FleetView
from sglang_rollout.controller.render import names
from sglang_rollout.wire.reasons import end_sentence
from sglang_rollout.wire.record import Record, StoreState

_REASONS = {
    TroubleKind.IMAGE: Reason.IMAGE_PULL_FAILED,
    TroubleKind.CREATE: Reason.CREATE_FAILED,
    TroubleKind.CRASH: Reason.STORE_CRASHED,
}
"""Reasons of a pod that does not come up without help."""
YOUNG_SECONDS = 10
"""Age of an update from which on a drain waits for its end."""


def is_store_in_use(fleet: FleetView) -> bool:
    """Return True if the loss of the store's pod would fail an update: a process group is open, or an update."""
    record = fleet.record
    return record is not None and (bool(record.joined) or record.under_way is not None)


def is_store_protected(fleet: FleetView, now: str) -> bool:
    """Return True if a drain must wait for the store's pod: a process group is open, or an update that is no longer young.

    A young update is sent again quickly, and most updates end young. So most updates do not write the budget.

    Args:
        fleet: The view of the rollout.
        now: Time (RFC 3339). Without it, every open update counts.
    """
    return is_store_in_use(fleet) and not is_update_young(fleet, now)


def is_update_young(fleet: FleetView, now: str) -> bool:
    """Return True if an update is open that was opened less than ``YOUNG_SECONDS`` ago, and no process group."""
    record = fleet.record
    if record is None or record.joined or record.under_way is None or not (now and record.under_way_since):
        return False
    return seconds_since(record.under_way_since, now) < YOUNG_SECONDS


def find_outdated_store(fleet: FleetView, unapplied: set[str]) -> Pod | None:
    """Return the store's pod if it must be replaced now.

    A pod that works is replaced only while it is not in use. Its successor takes the committed version from the engine pods.

    Args:
        fleet: The view of the rollout.
        unapplied: Names of children that this pass applies. A pod deleted now could return from the old template.
    """
    pod, statefulset = fleet.store_pod, fleet.store
    if pod is None or statefulset is None or pod.is_terminating or not fleet.is_store_observed:
        return None
    wanted = statefulset["spec"]["template"]["metadata"]["labels"].get(names.LABEL_REVISION)
    is_current = pod.revision == wanted and not pod.is_older_than_restart(statefulset)
    if names.store_name(fleet.name) in unapplied or is_current:
        return None
    return None if pod.is_ready and is_store_in_use(fleet) else pod


def evaluate_store(fleet: FleetView) -> Finding | None:
    """Return the finding of ``StoreReady``; None if the rollout has no weight store."""
    if fleet.rollout is None or not fleet.rollout.spec.weights.is_staged:
        return None
    if problem := describe_store_problem(fleet):
        return _finding("False", _find_reason(fleet), problem)
    record = fleet.record
    if record is None:
        return _finding("Unknown", Reason.NOT_REPORTED, fleet.record_problem or "The coordinator has not reported yet.")
    return _describe_report(record)


def _describe_report(record: Record) -> Finding:
    """Return the finding for a store whose pod is ready."""
    if record.store is None:
        return _finding("Unknown", Reason.NOT_REPORTED, "The coordinator has not reported about the weight store yet.")
    state, message = record.store.state, record.store.message
    if state is StoreState.AWAY:
        return _finding("False", Reason.STORE_NOT_READY, "The pod of the weight store is ready, but does not answer the coordinator.")
    if state is StoreState.COMPLETE:
        return _finding("True", Reason.STORE_RUNNING, "The weight store runs and has every version that it should have.")
    lacks = f"The weight store lacks version {format_version(record.committed)}"
    if state is StoreState.FETCHING:
        return _finding("False", Reason.STORE_LACKS_VERSION, f"{lacks}, and is fetching it.")
    return _finding("False", Reason.STORE_LACKS_VERSION, f"{lacks}. {message}".rstrip())


def _find_reason(fleet: FleetView) -> Reason:
    """Return why the store's pod is not ready."""
    pod = fleet.store_pod
    if pod is None:
        return Reason.CREATE_FAILED if has_store_failed(fleet) else Reason.STORE_NOT_READY
    if trouble := pod.find_trouble():
        return _REASONS.get(trouble.kind, Reason.STORE_NOT_READY)
    return Reason.UNSCHEDULABLE if pod.scheduler_message else Reason.STORE_NOT_READY


def _finding(status: Status, reason: Reason, message: str) -> Finding:
    return Finding(ConditionType.STORE_READY, status, reason, message)


def describe_store_problem(fleet: FleetView) -> str:
    """Return why the weight store takes no weights, as sentences; empty if it does, or if the rollout has none."""
    if fleet.rollout is None or not fleet.rollout.spec.weights.is_staged:
        return ""
    pod = fleet.store_pod
    if pod is not None and pod.is_ready:
        return ""
    why = _describe_failure(fleet) or _describe_start(pod)
    return f"The weight store is not ready, so the fleet takes no new weights. {why}"


def _describe_start(pod: Pod | None) -> str:
    if pod is None:
        return "It is starting."
    if trouble := pod.find_trouble():
        return f"Pod {pod.name}: {trouble.text}; it is starting again."
    return "It is starting." if pod.node else f"Pod {pod.name} waits for the scheduler."


def has_store_failed(fleet: FleetView) -> bool:
    """Return True if the weight store does not become ready without a person."""
    return bool(describe_store_problem(fleet)) and bool(_describe_failure(fleet))


def _describe_failure(fleet: FleetView) -> str:
    pod = fleet.store_pod
    if pod is None:
        name, error = names.store_name(fleet.name), fleet.cluster.creation_errors.get(names.store_name(fleet.name))
        return end_sentence(f"The pod of StatefulSet {name} cannot be created: {error}") if error else ""
    if (trouble := pod.find_trouble()) and trouble.kind is not TroubleKind.RESTART:
        return end_sentence(f"Pod {pod.name}: {trouble.text}")
    if not pod.scheduler_message:
        return ""
    why = end_sentence(f"Pod {pod.name}: no node can take it: {pod.scheduler_message}")
    gpu = fleet.rollout.spec.weights.store.gpu if fleet.rollout is not None and fleet.rollout.spec.weights.store is not None else None
    if gpu is None or gpu.resource not in pod.scheduler_message:
        return why
    return f"{why} It asks for one {gpu.resource} (weights.store.gpu), beside those of the engines."
