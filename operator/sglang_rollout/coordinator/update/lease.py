"""Which of the allowed trainers holds the fleet. Pure.

A trainer holds the fleet from the call on that opens a process group, an update or a pause, or that releases memory. While anything is
open, other trainers are refused until the holder has been silent for the time of the lease, or has no pods any more. Calls that open
nothing, and calls that are refused, never change the holder.

No trainer joins or ends the update of another trainer. After the lease has expired, a call that begins something abandons the open
update first, and all other calls are refused. If the holder has no pods any more, every call abandons its update. So the holder is the
author of the open update.

Unmodified trainers send no heartbeat, so the lease of an idle trainer expires between its pushes. The trainer loses nothing by that: while
no other trainer has an update, a pause or memory, the trainer of an open process group is always allowed.

A trainer that has the memory of engines computes in it, possibly for many minutes without a call. Engines that took the memory back would
end it. So its lease lasts while its pods live, and for ``weights.deadlines.totalSeconds`` if it is no pod.
"""

from __future__ import annotations

import math
from typing import Any

from sglang_rollout.coordinator.callers.pods import is_pods
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.interruption import Cause
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.trainer import Trainer
from sglang_rollout.wire.ports import FLEET_CLAIM
from sglang_rollout.wire.reasons import RefusedError

_OPENING = (rq.OpenGroup, rq.Begin, rq.Update, rq.Upload, rq.Pause, rq.FromDisk, rq.Tensors, rq.ReleaseMemory, rq.Claim)
"""Calls that make their caller the holder if they succeed."""
_BEGINNING = (*_OPENING, rq.ResumeMemory)
"""First calls of a push. A trainer that shares its GPUs with the engines resumes memory first."""


def is_holder(fleet: Fleet, caller: str) -> bool:
    """Return True unless another trainer holds the fleet. A caller without a name is the only trainer."""
    return not caller or not fleet.holder or caller == fleet.holder


def seconds_left(fleet: Fleet, trainer: Trainer) -> float:
    """Return the seconds after which the lease of the holder expires without a call or heartbeat of the holder; 0 if it has expired.

    Infinite for pods that have the memory of engines. A holder without pods has no lease.
    """
    if _is_holder_gone(fleet):
        return 0.0
    if fleet.has_trainer_memory and is_pods(fleet.holder):
        return math.inf
    if trainer.holder_waits:
        return float(fleet.policy.trainer_lease.ttl_seconds)
    if not _is_anything_open(fleet):
        return 0.0
    ttl = fleet.policy.deadlines.total_seconds if fleet.has_trainer_memory else fleet.policy.trainer_lease.ttl_seconds
    return max(0.0, max(trainer.renewed, fleet.held_since) + ttl - fleet.now)


def is_of_trainer(fleet: Fleet, request: rq.Request, caller: str) -> bool:
    """Return True if a call proves that the trainer lives. Calls of others that open nothing prove nothing while anything is open."""
    call = request.call if isinstance(request, rq.AtEngine) else request
    return is_holder(fleet, caller) or isinstance(call, _OPENING) or not _is_anything_open(fleet)


def find_refusal(fleet: Fleet, trainer: Trainer, request: rq.Request | None, caller: str) -> RefusedError | None:
    """Return the refusal of a call while another trainer holds the fleet; None if the call is allowed.

    Args:
        fleet: The fleet.
        trainer: What is known about the trainer.
        request: The call; None: a call that opens nothing and that no operation answers.
        caller: Who calls.
    """
    left = seconds_left(fleet, trainer)
    call = request.call if isinstance(request, rq.AtEngine) else request
    takes_over = isinstance(call, rq.Claim) and call.take_over
    if is_holder(fleet, caller) or takes_over or _may_return(fleet, caller):
        return None
    if left <= 0 and (fleet.update is None or isinstance(call, _BEGINNING) or _is_holder_gone(fleet)):
        return None
    details: dict[str, Any] = {"holder": fleet.holder}
    if left < math.inf:
        details["expires_in"] = round(left, 1)
    take_over = f'take the fleet over with POST {FLEET_CLAIM} {{"take_over": true}}.'
    if left <= 0:
        message = f"The open update belongs to another trainer: {fleet.holder}. Begin another update, or {take_over}"
    elif left == math.inf:
        message = (
            f"Another trainer holds this fleet: {fleet.holder}. It has memory of the engines, and so holds the fleet while its pods live."
            f" Wait until it has resumed the memory, or {take_over}"
        )
    else:
        message = (
            f"Another trainer holds this fleet: {fleet.holder}. Its lease expires in {left:.0f} s, unless it calls (weights.trainerLease)."
            f" Try again then, or {take_over}"
        )
    return RefusedError(message, status=409, fleet=details)


def _is_holder_gone(fleet: Fleet) -> bool:
    return bool(fleet.gone) and fleet.gone == fleet.holder


def _is_anything_open(fleet: Fleet) -> bool:
    return bool(fleet.groups) or _is_busy(fleet)


def _is_busy(fleet: Fleet) -> bool:
    """Return True if a trainer has an open update, a pause or memory of the engines."""
    return fleet.update is not None or fleet.has_trainer_memory or _is_paused_by_trainer(fleet)


def _is_paused_by_trainer(fleet: Fleet) -> bool:
    return fleet.requested_pause is not None and fleet.requested_pause.cause is Cause.TRAINER


def _may_return(fleet: Fleet, caller: str) -> bool:
    """Return True for the trainer of an open process group while no other trainer has an update, a pause or memory."""
    return not _is_busy(fleet) and any(group.author == caller for group in fleet.groups.values())
