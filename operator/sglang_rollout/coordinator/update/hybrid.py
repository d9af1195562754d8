"""Weights that a trainer puts into each engine by itself (``spec.mode: Hybrid``), as one transaction over all engines. Pure.

Trainer and engines share GPUs, so tensors come as handles that only a process on the engine's node can open, at that engine's own URL. The
first tensors for any engine open the update. An engine has all of its tensors when the trainer ends the session that it began there. A
trainer that began none flushes the cache or resumes memory for it, as verl does. When all engines have their tensors, the version is
committed and the gates open together. No call tells which trainer sends it, or which push it belongs to. Mixed pushes show by their
versions or, without versions, by the checksums of the engines, which are then compared whatever ``weights.verify`` says.
"""

from __future__ import annotations

from sglang_rollout.coordinator.update import memory, transaction
from sglang_rollout.coordinator.update.membership import engines_without_tensors, name_engines
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.outcome import (
    FENCED,
    abandon,
    begin_verification,
    fail_update,
    has_enough_engines,
    verify_and_commit,
)
from sglang_rollout.coordinator.update.phases import Phase, Update
from sglang_rollout.coordinator.update.requests import (
    Answer,
    Begin,
    Body,
    End,
    Flush,
    ResumeMemory,
    Tensors,
)
from sglang_rollout.coordinator.update.sources import Delivery, deliver, keep_cache_in_place
from sglang_rollout.coordinator.update.steps import PATIENCE_SECONDS, SLOWEST_FACTOR, failures, same_body, send, sync
from sglang_rollout.coordinator.update.transaction import open_sessions
from sglang_rollout.sglang.api import ControlCall, MemoryTag
from sglang_rollout.wire.reasons import RefusedError
from sglang_rollout.wire.record import UpdateReason
from sglang_rollout.wire.states import EngineState


async def begin(fleet: Fleet, ask: Begin, name: str) -> Answer:
    """Open a session on this engine, for a trainer that knows sessions."""
    failed = await _open_session(fleet, name, ask.body, trainer_session=True)
    return failed or Answer(200, "Success", {"version": str(fleet.target())})


async def check_handles(fleet: Fleet, ask: Tensors, name: str) -> None:
    """Refuse tensors that do not have one entry for each rank of the engine."""
    size, given = fleet.engines[name].tensor_size, len(ask.body["serialized_named_tensors"])
    if given != size:
        raise RefusedError(f"serialized_named_tensors has {given} entries, and engine {name} has {size} ranks: send one for each.")


async def receive(fleet: Fleet, ask: Tensors, name: str, _checked: None) -> Answer:
    """Bring tensors to one engine, or fail the update as a whole."""
    failed = await _open_session(fleet, name, {key: ask.body[key] for key in ("selector",) if key in ask.body})
    if failed is not None:
        return failed
    update = fleet.require_update()
    if ask.label and update.label and ask.label != update.label:
        why = f"engine {name} was sent version {ask.label}, and others version {update.label}"
        return await fail_update(fleet, UpdateReason.UNEXPECTED_CALL, why, engine=name)
    body = keep_cache_in_place(fleet, ask.body)
    results = await deliver(fleet, Delivery(ControlCall.UPDATE_TENSOR.path, {name: body}, ask.label))
    result = results[name]
    if not result.ok:
        why = f"engine {name} did not take the tensors: {result.message}"
        return await fail_update(fleet, UpdateReason.ENGINE_FAILED, why, results, engine=name)
    update.names_unknown = True
    status = fleet.engines[name].status
    # The trainer does not have memory that the engine has not released by now, whatever was called or refused before.
    released = status.released if status is not None else ()
    fleet.interruptions.at_engines[name] = frozenset(fleet.interruptions.trainer_memory(name)) & frozenset(released)
    return Answer(200, result.message or "Success", {"version": str(fleet.target())})


async def end(fleet: Fleet, ask: End, name: str) -> Answer:
    """End the session that the trainer began on this engine."""
    lost = await _refuse_lost_part(fleet, name)
    if lost is not None:
        return lost
    update = fleet.update
    if update is None or name not in update.boots:
        raise RefusedError(f"no weight update is open on engine {name}: it was never begun, or has ended.")
    update.checksums = {**update.checksums, **ask.checksums}
    return await _end_session(fleet, name) or await _commit_if_all(fleet, "Success")


async def flush(fleet: Fleet, ask: Flush, name: str) -> Answer:
    """Flush one engine's cache. From a trainer without sessions the call means that the engine has all of its tensors.

    The commit then flushes the cache.
    """
    lost = await _refuse_lost_part(fleet, name)
    if lost is not None:
        return lost
    update = fleet.update
    if update is None or name not in update.boots:
        return await transaction.flush(fleet, ask, name)
    if name not in update.ended:
        if not _has_all_tensors(fleet, name):
            return await transaction.flush(fleet, ask, name)
        failed = await _end_session(fleet, name)
        if failed is not None:
            return failed
    return await _commit_if_all(fleet, "Cache flushed.")


async def resume(fleet: Fleet, ask: ResumeMemory, at: str | None = None) -> Answer:
    """Resume memory. verl resumes the memory of the cache after the tensors, as its last call of a push."""
    await memory.note_resumed(fleet, ask, at)
    if at is not None and (not ask.tags or MemoryTag.KV_CACHE in ask.tags):
        failed = await _refuse_lost_part(fleet, at)
        if failed is None and _has_all_tensors(fleet, at):
            failed = await _end_session(fleet, at)
        if failed is not None:
            return failed
    answer = await memory.resume(fleet, ask, at)
    if answer.success and fleet.update is not None and at in fleet.update.ended:
        return await _commit_if_all(fleet, answer.message)
    await sync(fleet)
    return answer


async def _refuse_lost_part(fleet: Fleet, name: str) -> Answer | None:
    """Refuse a call for an engine whose part of the push was given up.

    The trainer assumes that the engine has its tensors. What other engines received in the same push is given up, too, because the trainer
    sends all tensors again.
    """
    status, update, last = fleet.engines[name].status, fleet.update, fleet.last_update
    if status is None or status.state is not EngineState.DIRTY or (update is not None and name in update.boots):
        return None
    why = f": {last.message.rstrip('.')}" if last is not None and last.message else ""
    if update is not None:
        await abandon(fleet, UpdateReason.ENGINE_LOST, f"engine {name} has lost its part of the push")
    message = f"engine {name} holds part of an update that was given up{why}. Send all tensors again, to every engine."
    return Answer(409, message, {"engine": name})


async def _open_session(fleet: Fleet, name: str, body: Body, *, trainer_session: bool = False) -> Answer | None:
    boot = fleet.boot(name)
    if boot is None:
        raise RefusedError(f"engine {name} cannot take an update now: {fleet.engines[name].why_absent().rstrip('.')}.", status=503)
    failed = await open_sessions(fleet, {name: boot}, body, trainer_session=trainer_session)
    if failed is None:
        fleet.enter(Phase.TRANSFER)
    return failed


def _has_all_tensors(fleet: Fleet, name: str) -> bool:
    """Return True if the next flush or resume of the trainer means that this engine has all of its tensors."""
    update = fleet.update
    return update is not None and not update.trainer_session and name in update.received and name not in update.ended


async def _end_session(fleet: Fleet, name: str) -> Answer | None:
    """End the session of an engine that has all of its tensors. Returns the answer if the update failed."""
    update = fleet.require_update()
    began = fleet.now
    results = await send(ControlCall.END_UPDATE.path, same_body([name]), _end_deadline(fleet, update))
    broken = failures(results)
    if not broken:
        update.slowest_end = max(update.slowest_end, fleet.now - began)
    if name not in update.received:
        update.drop({name: "had got no tensors of the update when it ended"}, UpdateReason.INCOMPLETE)
    elif broken:
        update.drop({name: f"could not end the session: {broken[name].message}"}, UpdateReason.ENGINE_FAILED)
    update.ended.add(name)
    if has_enough_engines(fleet, update):
        return None
    return await fail_update(fleet, update.reason, f"engine {name} {update.dropped[name]}", results, engine=name)


def _end_deadline(fleet: Fleet, update: Update) -> float:
    """Return the seconds that a session may take to end. Once half of the sessions have ended, the limit follows the slowest of them."""
    limit = fleet.policy.deadlines.update_seconds
    return limit if 2 * len(update.ended) < len(fleet.engines) else min(limit, max(PATIENCE_SECONDS, SLOWEST_FACTOR * update.slowest_end))


async def _commit_if_all(fleet: Fleet, done: str) -> Answer:
    """Commit if all engines have their tensors. Otherwise the answer names the engines that are missing."""
    update = fleet.require_update()
    if engines_without_tensors(fleet):
        return Answer(200, f"{done} {_waits_message(fleet)}", {"version": str(fleet.target()), "waits_for": engines_without_tensors(fleet)})
    begin_verification(fleet, update)
    committed = await verify_and_commit(fleet, update, {})
    return Answer(200, done, committed.fleet) if committed.success and FENCED not in committed.fleet else committed


def _waits_message(fleet: Fleet) -> str:
    return f"The version is committed when {name_engines(engines_without_tensors(fleet))} have all of their tensors, too."
