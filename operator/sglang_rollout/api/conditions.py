"""Types and reasons of conditions, and how a list of them changes. Pure: the time is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from sglang_rollout.api.status import Condition

Status = Literal["True", "False", "Unknown"]


class ConditionType(StrEnum):
    """The aspects of a fleet's state."""

    READY = "Ready"
    """All wanted engines, or those of the base, serve the committed weights, made from the current spec."""
    AVAILABLE = "Available"
    """The URL answers: at least one engine serves."""
    PROGRESSING = "Progressing"
    """The operator is still on its way to what the spec says."""
    ROUTER_READY = "RouterReady"
    """The router pod runs: weights can be pushed and the discovery document be read."""
    WEIGHTS_CONSISTENT = "WeightsConsistent"
    """All engines hold the committed version."""
    WAITING_FOR_WEIGHTS = "WaitingForWeights"
    """An engine is up and serves nobody, because it does not hold the committed version."""
    DEGRADED = "Degraded"
    """Something failed that a person should look at."""


class Reason(StrEnum):
    """Why a condition has its status: constants that programs may compare with."""

    ALL_SERVING = "AllServing"
    BASE_SERVING = "BaseServing"
    SCALED_TO_ZERO = "ScaledToZero"
    SUSPENDED = "Suspended"
    PAUSED = "Paused"
    ASLEEP = "Asleep"
    ASLEEP_FOR_TRAINER = "AsleepForTrainer"
    ENGINES_SERVING = "EnginesServing"
    NO_ENGINE_SERVING = "NoEngineServing"
    SETTLED = "Settled"
    AS_EXPECTED = "AsExpected"
    ROUTER_RUNNING = "RouterRunning"
    ALL_AT_COMMITTED = "AllAtCommitted"
    NOT_REPORTED = "NotReported"

    INVALID_SPEC = "InvalidSpec"
    APPLY_FAILED = "ApplyFailed"
    NAME_TAKEN = "NameTaken"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    ENGINE_CRASHED = "EngineCrashed"
    CREATE_FAILED = "CreateFailed"
    RESTART_BUDGET_EXHAUSTED = "RestartBudgetExhausted"
    INSUFFICIENT_CAPACITY = "InsufficientCapacity"
    WAITING_FOR_QUEUE = "WaitingForQueue"
    QUEUE_NOT_FOUND = "QueueNotFound"
    GANG_NOT_POSSIBLE = "GangNotPossible"
    PODS_NOT_READY = "PodsNotReady"
    ROUTER_NOT_READY = "RouterNotReady"
    UPDATING = "Updating"
    SCALING = "Scaling"
    SCALED_DOWN = "ScaledDown"
    WAITING_FOR_WEIGHTS = "WaitingForWeights"
    WEIGHTS_DIVERGED = "WeightsDiverged"
    UPDATING_WEIGHTS = "UpdatingWeights"
    TRAINER_LOST = "TrainerLost"
    UPDATE_FAILED = "UpdateFailed"
    PARTLY_COMMITTED = "PartlyCommitted"
    NODES_AVOIDED = "NodesAvoided"
    PREFETCH_FAILED = "PrefetchFailed"
    ADAPTER_FAILED = "AdapterFailed"
    ENGINES_FAILED = "EnginesFailed"
    UNSCHEDULABLE = "Unschedulable"
    DOWNLOAD_FAILED = "DownloadFailed"


@dataclass(frozen=True)
class Finding:
    """What is to be said about one aspect now."""

    type: ConditionType
    status: Status
    reason: Reason
    message: str


def conditions(findings: Iterable[Finding], previous: Iterable[Mapping[str, Any]], *, generation: int, now: str) -> list[Condition]:
    """Return the conditions; ``lastTransitionTime`` is ``now`` only where ``status`` changed."""
    before = {str(condition.get("type")): condition for condition in previous}
    made = []
    for finding in findings:
        old = before.get(finding.type.value, {})
        since = old.get("lastTransitionTime") if old.get("status") == finding.status else None
        made.append(
            Condition(
                type=finding.type.value,
                status=finding.status,
                reason=finding.reason.value,
                message=finding.message,
                observed_generation=generation,
                last_transition_time=since or now,
            )
        )
    return made


def find(status: Mapping[str, Any] | None, kind: ConditionType) -> Mapping[str, Any]:
    """Return a condition of a status; empty if it is not there."""
    found = ((status or {}).get("conditions")) or []
    return next((condition for condition in found if condition.get("type") == kind.value), {})
