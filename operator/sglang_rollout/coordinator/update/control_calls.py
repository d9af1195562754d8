"""Every control call: when it is legal, what happens otherwise, and which operation answers it. Pure.

:func:`answer` treats all calls alike:

1. Refuse an update that SGLang would refuse, and ``prepare``: checks that may take long and change nothing. Other operations run meanwhile.
2. Wait for the turn. Operations run one at a time, so the call meets the fleet in phase IDLE, PAUSE or TRANSFER (an update is open).
3. A call that would commit an update that has failed gets the failure as its answer. It still ends a pause.
4. If the call is not legal in this phase, refuse it, or abandon the open update first. No call joins the update of another trainer.
5. Carry out the operation.

Calls mean something else on a fleet that shares its GPUs with a trainer (``spec.mode``), and at the URL of one of its engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_rollout.api.weights_spec import Transport
from sglang_rollout.coordinator.update import adapters, hybrid, memory, process_groups, sources, staged, transaction
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.failed_commit import find_repeated_failure
from sglang_rollout.coordinator.update.interruption import Cause
from sglang_rollout.coordinator.update.lease import is_holder
from sglang_rollout.coordinator.update.membership import engines_without_tensors, name_engines, refuse_updates
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.outcome import abandon, last_reason
from sglang_rollout.coordinator.update.phases import Phase
from sglang_rollout.coordinator.update.ranks import DEFAULT_GROUP_NAME
from sglang_rollout.coordinator.update.steps import Operation, turn
from sglang_rollout.sglang.api import MemoryTag
from sglang_rollout.wire.reasons import RefusedError
from sglang_rollout.wire.record import UpdateReason
from sglang_rollout.wire.states import BY_HANDLES, KEEPS_WEIGHTS, FleetMode

ANY = frozenset({Phase.IDLE, Phase.PAUSE, Phase.TRANSFER, Phase.STAGE})
NO_UPDATE = frozenset({Phase.IDLE, Phase.PAUSE})
UPDATE_OPEN = frozenset({Phase.TRANSFER, Phase.STAGE})

WRITES = (rq.OpenGroup, rq.Begin, rq.Update, rq.Tensors, rq.FromDisk, rq.Upload)
"""Calls that bring weights, or that only an update needs."""

OWN_GPUS = "An engine of this fleet takes no calls of its own (spec.mode: Standalone): call the fleet's URL, which is one for all engines."
FLEET_ONLY = "this call is for the fleet's URL, which is one for all engines."
AT_ENGINES = "weights come to each engine of this fleet at that engine's own URL (spec.mode: Hybrid), and so does this call."


@dataclass(frozen=True)
class Refuse:
    """Refuse the call."""

    message: str
    status: int = 409


@dataclass(frozen=True)
class Abandon:
    """Abandon the open update, then continue."""

    reason: str


@dataclass(frozen=True)
class Handler:
    """How a call is answered."""

    operation: Callable[..., Operation[rq.Answer]]
    """Takes the fleet and the call; at an engine's URL also the engine's name; last what ``prepare`` returned, if there is one."""
    legal: frozenset[Phase] = ANY
    """The phases in which the call is legal."""
    otherwise: Refuse | Abandon | None = None
    """What happens in the other phases. Texts may name ``{engine}``, ``{rest}`` (engines that still wait for tensors) and ``{last}`` (why
    the last update failed)."""
    exception: Callable[[Fleet, rq.Call, str | None], bool] | None = None
    """True where the call is legal in the other phases, too. Third argument: the engine at whose URL the call came."""
    prepare: Callable[..., Operation[Any]] | None = None
    """Checks before the turn."""


def _coordinator_paused(fleet: Fleet, _call: rq.Call, _at: str | None) -> bool:
    return fleet.requested_pause is None or fleet.requested_pause.cause is not Cause.TRAINER


def _opens_another_group(fleet: Fleet, call: rq.Call, _at: str | None) -> bool:
    return isinstance(call, rq.OpenGroup) and call.body.get("group_name", DEFAULT_GROUP_NAME) not in fleet.groups


def _may_set_label(fleet: Fleet, call: rq.Call, _at: str | None) -> bool:
    """Return True if the trainer has paused, or repeats the committed label."""
    return fleet.defers_pause or _repeats_the_label(fleet, call)


def _repeats_the_label(fleet: Fleet, call: rq.Call) -> bool:
    return isinstance(call, rq.SetLabel) and fleet.committed is not None and fleet.committed.label == call.label


def _is_new_to_the_engine(fleet: Fleet, _call: rq.Call, at: str | None) -> bool:
    return fleet.update is not None and at not in fleet.update.boots


def _continues_at_the_engine(fleet: Fleet, _call: rq.Call, at: str | None) -> bool:
    return fleet.update is not None and at not in fleet.update.ended


def _wakes_no_updated_engine(fleet: Fleet, call: rq.Call, at: str | None) -> bool:
    """Return True unless this wakes the weights of an engine that has received tensors.

    A trainer wakes weights before it sends any. After that it is another trainer, or the trainer starts again.
    """
    updated = fleet.update is not None and at in fleet.update.received
    return not (updated and isinstance(call, rq.ResumeMemory) and MemoryTag.WEIGHTS in call.tags)


Table = Mapping[type[rq.Call], Handler | Refuse]

STANDALONE: Table = {
    rq.OpenGroup: Handler(
        process_groups.open_group,
        NO_UPDATE,
        Abandon("the trainer opened the same process group again in the middle of an update"),
        exception=_opens_another_group,
        prepare=process_groups.check_group_request,
    ),
    rq.CloseGroup: Handler(process_groups.close_group),
    rq.Pause: Handler(
        transaction.pause, NO_UPDATE, Abandon("the trainer paused again without ending its update"), exception=_coordinator_paused
    ),
    rq.Continue: Handler(transaction.continue_all),
    rq.Begin: Handler(transaction.begin, NO_UPDATE, Abandon("the trainer began again without ending its update")),
    rq.Update: Handler(sources.receive_from_group),
    rq.End: Handler(
        transaction.end,
        UPDATE_OPEN,
        Refuse("no weight update is open: it was never begun, has ended, or was given up{last}. Call begin_weight_update first.", 400),
    ),
    rq.Flush: Handler(transaction.flush),
    rq.SetLabel: Handler(
        transaction.set_label,
        UPDATE_OPEN | {Phase.PAUSE},
        Refuse(
            "no weight update is open, and committed weights keep their version: send new_version before"
            " end_weight_update, or weight_version with the tensors."
        ),
        exception=_may_set_label,
    ),
    rq.NewRun: Handler(transaction.new_run, NO_UPDATE, Refuse("a weight update is open: end it, then open a new run.")),
    rq.FromDisk: Handler(
        sources.load_from_disk,
        NO_UPDATE,
        Refuse("a weight update is open: end it before one from disk."),
        prepare=sources.check_checkpoint,
    ),
    **dict.fromkeys(
        (rq.Upload, rq.CommitUpload, rq.WithdrawUpload),
        Refuse(
            "This fleet takes no uploads: only a fleet with weights.transport Staged has a weight store. Open a process group with"
            " init_weights_update_group, or call update_weights_from_disk.",
            400,
        ),
    ),
    rq.Claim: Handler(transaction.claim),
    rq.LoadAdapter: Handler(
        adapters.load,
        NO_UPDATE,
        Refuse("a weight update is open: end it before adapters change."),
        prepare=adapters.check_adapter,
    ),
    rq.UnloadAdapter: Handler(adapters.unload, NO_UPDATE, Refuse("a weight update is open: end it before adapters change.")),
    rq.ReleaseMemory: Handler(memory.release, NO_UPDATE, Refuse("a weight update is open: end it before memory is released.")),
    rq.ResumeMemory: Handler(memory.resume),
}
"""A fleet with GPUs of its own."""
STAGED: Table = {
    **STANDALONE,
    rq.Begin: Handler(staged.begin, NO_UPDATE, Abandon("the trainer began again without ending its update")),
    rq.Update: Handler(staged.receive),
    rq.FromDisk: Refuse(
        "This fleet loads no checkpoints from disk (weights.transport: Staged): upload the tensors with POST /fleet/updates, or send them"
        " through a process group.",
        400,
    ),
    rq.Upload: Handler(
        staged.open_upload,
        NO_UPDATE,
        Abandon("the trainer began an upload without ending its update"),
        prepare=staged.check_upload,
    ),
    rq.CommitUpload: Handler(staged.commit_upload),
    rq.WithdrawUpload: Handler(staged.withdraw_upload),
}
"""A fleet with GPUs of its own whose tensors go to the weight store first (``weights.transport: Staged``)."""

_NO_WEIGHTS: Table = dict.fromkeys(
    (
        *(rq.OpenGroup, rq.CloseGroup, rq.Begin, rq.Update, rq.Tensors, rq.End, rq.SetLabel, rq.NewRun, rq.FromDisk),
        *(rq.Upload, rq.CommitUpload, rq.WithdrawUpload),
    ),
    Refuse(KEEPS_WEIGHTS, 400),
)
_RELEASE = Handler(
    memory.release_for_trainer, NO_UPDATE, Abandon("the trainer released memory before all engines had got all of their tensors")
)
_NO_GROUPS: Table = dict.fromkeys((rq.OpenGroup, rq.CloseGroup, rq.Update), Refuse(BY_HANDLES, 400))
_RESUME_HYBRID = Handler(
    hybrid.resume,
    NO_UPDATE,
    Abandon("the trainer began again at engine {engine} before {rest} had got all of their tensors"),
    exception=_wakes_no_updated_engine,
)

COLOCATED: Table = {
    **STANDALONE,
    **_NO_WEIGHTS,
    rq.ReleaseMemory: _RELEASE,
    rq.ResumeMemory: Handler(memory.resume_for_trainer),
}
"""A fleet on its trainer's GPUs that keeps its weights (``spec.mode: Colocated``)."""
AT_COLOCATED_ENGINE: Table = {
    **_NO_WEIGHTS,
    rq.ReleaseMemory: _RELEASE,
    rq.ResumeMemory: Handler(memory.resume_for_trainer),
    rq.Flush: Handler(transaction.flush),
}
"""One engine of such a fleet."""
HYBRID: Table = {
    **STANDALONE,
    **_NO_GROUPS,
    rq.Begin: Refuse(AT_ENGINES, 400),
    rq.Tensors: Refuse(AT_ENGINES, 400),
    rq.ReleaseMemory: _RELEASE,
    rq.ResumeMemory: _RESUME_HYBRID,
}
"""A fleet on its trainer's GPUs whose trainer sends each engine its tensors (``spec.mode: Hybrid``)."""
AT_HYBRID_ENGINE: Table = {
    **_NO_GROUPS,
    rq.Begin: Handler(
        hybrid.begin,
        NO_UPDATE,
        Abandon("the trainer began again at engine {engine} without ending its update"),
        exception=_is_new_to_the_engine,
    ),
    rq.Tensors: Handler(
        hybrid.receive,
        NO_UPDATE,
        Abandon("engine {engine} was sent new tensors before {rest} had got all of theirs"),
        exception=_continues_at_the_engine,
        prepare=hybrid.check_handles,
    ),
    rq.End: Handler(hybrid.end),
    rq.SetLabel: STANDALONE[rq.SetLabel],
    rq.Flush: Handler(hybrid.flush),
    rq.ReleaseMemory: _RELEASE,
    rq.ResumeMemory: _RESUME_HYBRID,
}
"""One engine of such a fleet."""
TABLES: Mapping[FleetMode | Transport | None, tuple[Table, Table]] = {
    None: (STANDALONE, {}),
    Transport.STAGED: (STAGED, {}),
    FleetMode.COLOCATED: (COLOCATED, AT_COLOCATED_ENGINE),
    FleetMode.HYBRID: (HYBRID, AT_HYBRID_ENGINE),
}
"""By mode, or by the transport Staged of mode Standalone: calls at the fleet's URL, and calls at one engine's URL."""


async def answer(fleet: Fleet, request: rq.Request) -> rq.Answer:
    """Answer a request. Raises RefusedError if it is refused."""
    call, at = (request.call, request.engine) if isinstance(request, rq.AtEngine) else (request, None)
    handler = _find_handler(fleet, call, at)
    if isinstance(call, WRITES):
        refuse_updates(fleet)
    arguments = [fleet, call] if at is None else [fleet, call, at]
    if handler.prepare is not None:
        arguments.append(await handler.prepare(*arguments))
    await turn()
    _require_engine(fleet, at)  # it may have left the fleet meanwhile
    committed = fleet.committed.label if fleet.committed is not None else None
    failure = find_repeated_failure(fleet.transaction, call, fleet.caller, committed) if at is None else None
    if failure is not None and fleet.pause is None:
        return failure
    await _apply_rule(fleet, handler, call, at)
    found = await handler.operation(*arguments)
    return failure or found


def _find_handler(fleet: Fleet, call: rq.Call, at: str | None) -> Handler:
    at_fleet, at_engine = TABLES[Transport.STAGED if fleet.is_staged else fleet.mode]
    if at is None:
        found = at_fleet[type(call)]
    elif fleet.mode is None:
        found = Refuse(OWN_GPUS, 400)
    else:
        _require_engine(fleet, at)
        found = at_engine.get(type(call), Refuse(FLEET_ONLY, 400))
    if isinstance(found, Refuse):
        raise RefusedError(found.message, status=found.status)
    return found


def _require_engine(fleet: Fleet, at: str | None) -> None:
    if at is not None and at not in fleet.engines:
        raise RefusedError(f"engine {at} is not in this fleet; its engines: {', '.join(fleet.engines)}.", status=404)


async def _apply_rule(fleet: Fleet, handler: Handler, call: rq.Call, at: str | None) -> None:
    """Refuse a call that is not legal now, or abandon the open update first. An update of another trainer is always abandoned."""
    if fleet.update is not None and not is_holder(fleet, fleet.caller):
        await abandon(fleet, UpdateReason.TAKEN_OVER, "another trainer took the fleet over")
    if fleet.phase in handler.legal or (handler.exception is not None and handler.exception(fleet, call, at)):
        return
    words = {"engine": at, "rest": name_engines(engines_without_tensors(fleet)), "last": last_reason(fleet)}
    match handler.otherwise:
        case Refuse(message, status):
            raise RefusedError(message.format(**words), status=status, fleet=fleet.advice())
        case Abandon(reason):
            await abandon(fleet, UpdateReason.UNEXPECTED_CALL, reason.format(**words))
        case None:
            raise RuntimeError(f"{type(call).__name__} has no rule for phase {fleet.phase}")
