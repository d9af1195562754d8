"""Weights that a trainer puts into each engine by itself (``spec.mode: Hybrid``), one transaction over all of them. Pure.

Trainer and engines share GPUs, so tensors come as handles that only a process on the engine's node can open, at that engine's own URL.
The first tensors for any engine open the update. An engine has all of its tensors when its trainer ends the session that it began; one
that began none flushes the cache or takes memory for it back, as verl does. When all engines have theirs, the version is
committed and the gates open together. Nothing in a call tells which trainer sends it, or which push it belongs to: pushes that were
mixed show by their versions or, where they have none, by the engines' checksums, which are compared then whatever ``weights.verify`` says.
"""

from __future__ import annotations

from sglang_rollout.coordinator.update import memory
from sglang_rollout.coordinator.update.membership import some, untold
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.outcome import abandon, close, fail, suffice
from sglang_rollout.coordinator.update.phases import Phase
from sglang_rollout.coordinator.update.progress import Update
from sglang_rollout.coordinator.update.ranks import Refusal
from sglang_rollout.coordinator.update.requests import (
    Answer,
    Begin,
    Body,
    Call,
    CloseGroup,
    End,
    Flush,
    OpenGroup,
    ResumeMemory,
    SetLabel,
    Tensors,
)
from sglang_rollout.coordinator.update.requests import Update as Distributed
from sglang_rollout.coordinator.update.rules import apply_rule, take_turn
from sglang_rollout.coordinator.update.steps import PATIENCE, SLOWER, Operation, failures, same, send, sync, turn
from sglang_rollout.coordinator.update.transaction import flush, set_label, tell
from sglang_rollout.sglang.api import ControlCall, PauseMode
from sglang_rollout.wire.states import BY_HANDLES
from sglang_rollout.wire.weights import EngineState

_CACHE = "kv_cache"
AT_ENGINES = "weights come to each engine of this fleet at that engine's own URL (spec.mode: Hybrid), and so does this call."


def operation(fleet: Fleet, call: Call, at: str | None) -> Operation[Answer] | None:  # noqa: PLR0911 - one line per case
    """Return the operation of a call at one engine's URL or at the fleet's; None if the call means what it means on every fleet."""
    match call:
        case OpenGroup() | CloseGroup() | Distributed():
            return _refused(BY_HANDLES)
        case Tensors() if at is not None:
            return _tensors(fleet, at, call)
        case Begin() if at is not None:
            return _begin(fleet, at, call)
        case End() if at is not None:
            return _end(fleet, at, call)
        case SetLabel():
            return set_label(fleet, call)
        case Begin() | Tensors():
            return _refused(AT_ENGINES)
    return None


async def _refused(why: str) -> Answer:
    raise Refusal(why)


async def _begin(fleet: Fleet, name: str, ask: Begin) -> Answer:
    """A trainer that knows sessions opens one on this engine."""
    await take_turn(fleet, ask, name)
    failed = await _tell(fleet, name, ask.body, trainer_session=True)
    return failed or Answer(200, "Success", {"version": str(fleet.target())})


async def _tensors(fleet: Fleet, name: str, ask: Tensors) -> Answer:
    """One engine gets tensors, or the update fails as a whole."""
    await turn()
    size, given = fleet.engines[name].tensor_size, len(ask.body["serialized_named_tensors"])
    if given != size:
        raise Refusal(f"serialized_named_tensors has {given} entries, and engine {name} has {size} ranks: send one for each.")
    await apply_rule(fleet, ask, name)
    failed = await _tell(fleet, name, {key: ask.body[key] for key in ("selector",) if key in ask.body})
    if failed is not None:
        return failed
    update = fleet.require_update()
    if ask.label and update.label and ask.label != update.label:
        return await fail(fleet, f"engine {name} was sent version {ask.label}, and others version {update.label}", engine=name)
    update.label = ask.label or update.label
    body = dict(ask.body)
    if fleet.pause is not None and fleet.pause.mode == PauseMode.IN_PLACE:
        body["flush_cache"] = False  # SGLang would write the tensors and then answer 400 for the flush
    results = await send(ControlCall.UPDATE_TENSOR.path, {name: body}, fleet.policy.deadlines.update_seconds)
    result = results[name]
    if not result.ok:
        return await fail(fleet, f"engine {name} did not take the tensors: {result.message}", results, engine=name)
    update.fed.add(name)
    update.opaque = True
    status = fleet.engines[name].status
    # What it has not released by now its trainer does not have, whatever was said or refused before.
    released = status.released if status is not None else ()
    fleet.interruptions.at_engines[name] = frozenset(fleet.interruptions.trainer_memory(name)) & frozenset(released)
    update.flushed.discard(name)
    if body.get("flush_cache", True):  # SGLang flushes unless it is told not to
        update.flushed.add(name)
    return Answer(200, result.message or "Success", {"version": str(fleet.target())})


async def _end(fleet: Fleet, name: str, ask: End) -> Answer:
    """The trainer ends the session that it began on this engine."""
    await turn()
    lost = await _lost(fleet, name)
    if lost is not None:
        return lost
    update = fleet.update
    if update is None or name not in update.boots:
        raise Refusal(f"no weight update is open on engine {name}: it was never begun, or has ended.")
    update.checksums = {**update.checksums, **ask.checksums}
    return await _delivered(fleet, name) or await _commit_if_all(fleet, "Success")


async def flush_one(fleet: Fleet, name: str, ask: Flush) -> Answer:
    """Flush one engine's cache: for a trainer without sessions it has all of its tensors then. The commit flushes."""
    await turn()
    lost = await _lost(fleet, name)
    if lost is not None:
        return lost
    update = fleet.update
    if update is None or name not in update.boots:
        return await flush(fleet, ask, [name])
    if name not in update.ended:
        if not _is_last_word(fleet, name):
            return await flush(fleet, ask, [name])
        failed = await _delivered(fleet, name)
        if failed is not None:
            return failed
    return await _commit_if_all(fleet, "Cache flushed.")


async def resume(fleet: Fleet, ask: ResumeMemory, at: str | None) -> Answer:
    """Memory is taken back; memory for the cache after the tensors, which is a trainer's last word about them in verl."""
    await apply_rule(fleet, ask, at)
    if at is not None and (not ask.tags or _CACHE in ask.tags):
        failed = await _lost(fleet, at)
        if failed is None and _is_last_word(fleet, at):
            failed = await _delivered(fleet, at)
        if failed is not None:
            return failed
    answer = await memory.resume(fleet, ask, at)
    if answer.success and fleet.update is not None and at in fleet.update.ended:
        return await _commit_if_all(fleet, answer.message)
    await sync(fleet)
    return answer


async def _lost(fleet: Fleet, name: str) -> Answer | None:
    """A trainer takes an engine for fed whose part was given up. It hears so now; what others have got of the same push goes with it,
    because it will send all of them again."""
    status, update, last = fleet.engines[name].status, fleet.update, fleet.last_update
    if status is None or status.state is not EngineState.DIRTY or (update is not None and name in update.boots):
        return None
    why = f": {last.reason.rstrip('.')}" if last is not None and last.reason else ""
    if update is not None:
        await abandon(fleet, f"engine {name} has lost its part of the push")
    message = f"engine {name} holds part of an update that was given up{why}. Send all tensors again, to every engine."
    return Answer(409, message, {"engine": name})


async def _tell(fleet: Fleet, name: str, body: Body, *, trainer_session: bool = False) -> Answer | None:
    boot = fleet.boot(name)
    if boot is None:
        raise Refusal(f"engine {name} cannot take an update now: {fleet.engines[name].why_absent().rstrip('.')}.", status=503)
    failed = await tell(fleet, {name: boot}, body, trainer_session=trainer_session)
    if failed is None:
        fleet.enter(Phase.TRANSFER)
    return failed


def _is_last_word(fleet: Fleet, name: str) -> bool:
    """Whether a call that is about something else says as well that this engine has all of its tensors."""
    update = fleet.update
    return update is not None and not update.trainer_session and name in update.fed and name not in update.ended


async def _delivered(fleet: Fleet, name: str) -> Answer | None:
    """This engine has all of its tensors: end its session. Returns what went wrong."""
    update = fleet.require_update()
    began = fleet.now
    results = await send(ControlCall.END_UPDATE.path, same([name]), _limit(fleet, update))
    broken = failures(results)
    if not broken:
        update.slowest_end = max(update.slowest_end, fleet.now - began)
    if name not in update.fed:
        update.dropped[name] = "had got no tensors of the update when it ended"
    elif broken:
        update.dropped[name] = f"could not end the session: {broken[name].message}"
    update.ended.add(name)
    if suffice(fleet, update):
        return None
    return await fail(fleet, f"engine {name} {update.dropped[name]}", results, engine=name)


def _limit(fleet: Fleet, update: Update) -> float:
    """How long a session may take to end: when half of the engines have ended theirs, as if all of them had been told at once."""
    limit = fleet.policy.deadlines.update_seconds
    return limit if 2 * len(update.ended) < len(fleet.engines) else min(limit, max(PATIENCE, SLOWER * update.slowest_end))


async def _commit_if_all(fleet: Fleet, done: str) -> Answer:
    """The last engine's trainer hears what became of the version; the others hear whom it waits for."""
    update = fleet.require_update()
    if untold(fleet):
        return Answer(200, f"{done} {_waits(fleet)}", {"version": str(fleet.target()), "waits_for": untold(fleet)})
    fleet.enter(Phase.VERIFY)
    for name in fleet.changed(update.boots):
        update.dropped[name] = "was restarted or lost in the middle of the update"
    committed = await close(fleet, update, {})
    return Answer(200, done, committed.fleet) if committed.status == 200 and committed.message == "Success" else committed


def _waits(fleet: Fleet) -> str:
    return f"The version is committed when {some(untold(fleet))} have all of their tensors, too."
