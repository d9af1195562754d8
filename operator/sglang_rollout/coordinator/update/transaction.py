"""The calls of a weight update from pause to resume, as operations. They know no source of weights: :mod:`.sources`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from sglang_rollout.api.weights_spec import TrainerPause
from sglang_rollout.coordinator.update.announced import refuse_fewer_at_engines
from sglang_rollout.coordinator.update.commit import commit_open_update
from sglang_rollout.coordinator.update.complete_push import note_held_weights
from sglang_rollout.coordinator.update.events import Result
from sglang_rollout.coordinator.update.failed_commit import commits_by_flush
from sglang_rollout.coordinator.update.interruption import Cause, Interruption
from sglang_rollout.coordinator.update.lease import is_holder
from sglang_rollout.coordinator.update.membership import NO_ENGINE_UP, describe_none_up, refuse_asleep
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.outcome import (
    FENCED,
    abandon,
    fail_update,
    last_reason,
    partial_message,
    reply_and_fence_dropped,
)
from sglang_rollout.coordinator.update.phases import Phase
from sglang_rollout.coordinator.update.phases import Update as OpenUpdate
from sglang_rollout.coordinator.update.ranks import Group
from sglang_rollout.coordinator.update.requests import Answer, Begin, Body, Claim, Continue, End, Flush, NewRun, Pause, SetLabel
from sglang_rollout.coordinator.update.steps import (
    GRACE_SECONDS,
    Results,
    failures,
    find_lost,
    results_by_engine,
    resume,
    same_body,
    send,
    send_and_mark_dirty,
)
from sglang_rollout.coordinator.update.store import describe_peer
from sglang_rollout.coordinator.update.versions import newest
from sglang_rollout.sglang.api import ControlCall, MemoryTag, PauseMode
from sglang_rollout.wire.reasons import RefusedError
from sglang_rollout.wire.record import UpdateReason
from sglang_rollout.wire.states import FleetState, describe_state


async def pause(fleet: Fleet, ask: Pause) -> Answer:
    """Pause all engines for the trainer, or none of them."""
    failed = await pause_all(fleet, Cause.TRAINER, ask.mode, ask.body)
    if failed is None:
        fleet.hold()
        fleet.transaction.failed = None
        if defers_pauses(fleet):
            return await _defer(fleet)
    names = list(fleet.up())
    message = "Generation paused successfully." if names else f"{NO_ENGINE_UP}, so none had to be paused."
    return failed or Answer(200, message, {"engines": names})


def defers_pauses(fleet: Fleet) -> bool:
    """Return True if a trainer's pause is deferred now: engines generate until they load the version."""
    staging = fleet.policy.staging
    defers = fleet.is_staged and staging is not None and staging.trainer_pause is TrainerPause.DEFER
    return defers and fleet.applied_state is FleetState.ACTIVE


async def _defer(fleet: Fleet) -> Answer:
    """Let the engines generate again after SGLang's pause has aborted or retracted their requests."""
    pause = fleet.pause
    if pause is None:
        raise RuntimeError("no pause is in effect that could be deferred")
    fleet.enter(Phase.RESUME)
    pause.is_deferred = True
    results = await resume(fleet, pause.engines)
    message = (
        "Generation paused successfully, and the pause is deferred: engines generate with the version that they hold until they load the"
        " next one (weights.staging.trainerPause: Defer)."
    )
    return Answer(200, message, {"deferred": True, "engines": results_by_engine(results)})


async def pause_all(fleet: Fleet, cause: Cause, mode: str | None, body: Body) -> Answer | None:
    """Pause all engines that are up, or none of them. Returns the answer for the trainer if that fails."""
    refuse_asleep(fleet)
    names = fleet.up()
    _require_any(fleet, names, "there is nothing to pause")
    # Engines whose memory is released are paused already.
    running = [name for name in names if not fleet.engines[name].released]
    failed = await _pause_engines(fleet, running, names, body, ends_held=mode == PauseMode.ABORT.sglang)
    if failed is None:
        fleet.interruptions.begin(Interruption(cause, mode=mode, engines=tuple(names), since=fleet.now, author=fleet.caller))
    return failed


async def pause_by_policy(fleet: Fleet, cause: Cause) -> Answer | None:
    """Pause all engines in the mode of the policy."""
    mode = fleet.policy.pause_mode.sglang
    return await pause_all(fleet, cause, mode, {"mode": mode})


async def pause_for_update(fleet: Fleet, names: Collection[str]) -> Answer | None:
    """Pause the fleet, unless its trainer has.

    Then pause those of these engines that the trainer's pause missed: they came up since, or their agents ended the pause by lease.
    """
    current = fleet.pause
    if current is None:
        return await pause_by_policy(fleet, Cause.UPDATE)
    late = [name for name in names if not fleet.engines[name].released and not fleet.engines[name].paused]
    if not late:
        return None
    paused = tuple(dict.fromkeys([*current.engines, *late]))
    failed = await _pause_engines(
        fleet, late, [name for name in paused if name in fleet.up()], {"mode": current.mode} if current.mode else {}
    )
    if failed is None:
        current.engines = paused
    return failed


async def _pause_engines(
    fleet: Fleet, running: Collection[str], names: Collection[str], body: Body, *, ends_held: bool = False
) -> Answer | None:
    """Pause the ``running`` engines. If one fails, resume all of ``names``. With transport Staged, engines that are lost do not matter."""
    fleet.enter(Phase.PAUSE)
    boots = {name: fleet.boot(name) for name in running}
    limit = fleet.policy.deadlines.pause_seconds
    results = await send(ControlCall.PAUSE.path, same_body(running, body), limit, ends_held=ends_held)
    for name in running:
        if results[name].ok:
            fleet.engines[name].anticipate(fleet.next_seq(), paused=True)
    failed = await _find_failures(fleet, results, boots)
    if not failed:
        return None
    name, result = next(iter(failed.items()))
    reason = f"engine {name} could not be paused: {result.message}"
    if fleet.update is not None:
        return await fail_update(fleet, UpdateReason.ENGINE_FAILED, reason, results, engine=name)
    # Engines that failed, too: a call without an answer may have paused its engine.
    await resume(fleet, names)
    fleet.interruptions.end_pause()
    now = describe_state(fleet.applied_state) or "All engines generate again."
    return Answer(400, f"{reason.rstrip('.')}. {now}", {"engine": name, "phase": "pause", "engines": results_by_engine(results)})


async def _find_failures(fleet: Fleet, results: Results, boots: Mapping[str, str | None]) -> dict[str, Result]:
    """Return the calls that failed at engines that the update needs.

    With transport Staged engines are in no process group, so the update continues without an engine that has ended or was restarted.
    Its agent loads the committed version when it is back.
    """
    failed = failures(results)
    if not failed or not fleet.is_staged:
        return failed
    lost = await find_lost(fleet, failed, boots)
    return {name: result for name, result in failed.items() if name not in lost}


async def continue_all(fleet: Fleet, ask: Continue) -> Answer:
    """End the trainer's pause. For a trainer without a session this is the commit."""
    update, committed = fleet.update, None
    if update is not None and not _is_upload(update):
        if update.trainer_session:
            reason = "continue_generation came before end_weight_update"
            return await fail_update(fleet, UpdateReason.UNEXPECTED_CALL, reason)
        committed = await commit_open_update(fleet, answer_now=False)
        if not committed.success:
            return committed
    fleet.enter(Phase.RESUME)
    # Cleared before the call: whatever its results are, every engine ends resumed or fenced.
    fleet.interruptions.end_pause()
    fleet.transaction.label = None
    names = fleet.up()
    _require_any(fleet, names, "nothing generates")
    particulars = dict(committed.fleet) if committed is not None else {}
    behind = particulars.get(FENCED, {})
    results = await resume(fleet, [name for name in names if name not in behind], ask.body)
    # Success, because the trainer's own pause has ended, and unmodified trainers take any other answer for a failed update.
    held = describe_state(fleet.applied_state)
    resumed = "Generation continued successfully." if names else f"{NO_ENGINE_UP}. Engines generate when they are up."
    message = f"Generation stays paused. {held}" if held else resumed
    if committed is not None and behind:
        message = f"{message} {partial_message(fleet, behind)}"
    # The state of a staged version comes before that of the fleet.
    answer = Answer(200, message, {"state": fleet.applied_state.value, **particulars, "resumed": results_by_engine(results)})
    return await reply_and_fence_dropped(fleet, answer)


def _is_upload(update: OpenUpdate) -> bool:
    """Return True for an upload, which only its own call commits."""
    return update.staged is not None and update.staged.is_upload


async def begin(fleet: Fleet, ask: Begin) -> Answer:
    """Open a session on every member of the open process groups. These engines are dirty until a complete update."""
    members = live_members(fleet)
    if ask.names:
        await refuse_fewer_at_engines(fleet, ask.names, ask.label, members)
    failed = await open_sessions(fleet, members, ask.body, trainer_session=True)
    if failed is None:
        update = fleet.require_update()
        update.label = ask.label or update.label
    return failed or Answer(200, "Success", {**fleet.advice(), "version": str(fleet.target())})


async def open_sessions(fleet: Fleet, boots: Mapping[str, str], body: Body, *, trainer_session: bool = False) -> Answer | None:
    """Open sessions on those of these engines that have none.

    Engines are paused first: otherwise SGLang waits for every running request.
    """
    open_update = fleet.update
    missing = {name: boot for name, boot in boots.items() if open_update is None or name not in open_update.boots}
    if not missing:
        return None
    refuse_asleep(fleet)
    for name in missing:
        engine = fleet.engines[name]
        if engine.status is not None and MemoryTag.WEIGHTS in engine.status.released:
            reason = f"engine {name} has released its weights: call resume_memory_occupation first."
            raise RefusedError(reason, status=409, fleet=fleet.advice())
        if not engine.member:
            reason = f"engine {name} cannot take an update now: {engine.why_absent().rstrip('.')}."
            raise RefusedError(reason, status=503, fleet=fleet.advice())
    failed = await pause_for_update(fleet, missing)
    if failed is not None:
        return failed
    fleet.enter(Phase.OPEN)
    if fleet.update is None:
        fleet.transaction.update = OpenUpdate({}, fleet.now, fleet.transaction.label, fleet.caller, trainer_session=trainer_session)
        fleet.hold()
    # Noted before the call: an engine whose answer is lost takes part, too.
    update = fleet.require_update()
    update.boots.update(missing)
    note_held_weights(fleet, update, missing)
    results = await send_and_mark_dirty(
        fleet, ControlCall.BEGIN_UPDATE.path, same_body(missing, body), fleet.policy.deadlines.update_seconds, grace=GRACE_SECONDS
    )
    failed_calls = failures(results)
    if failed_calls:
        name, result = next(iter(failed_calls.items()))
        why = f"engine {name} could not begin: {result.message}"
        return await fail_update(fleet, UpdateReason.ENGINE_FAILED, why, results, engine=name)
    fleet.enter(Phase.TRANSFER)
    return None


async def end(fleet: Fleet, ask: End) -> Answer:
    """Commit the update of the trainer's session."""
    update = fleet.require_update()
    update.checksums = ask.checksums
    return await commit_open_update(fleet)


async def flush(fleet: Fleet, ask: Flush, at: str | None = None) -> Answer:
    """Flush the cache of every engine, or only of engine ``at``.

    For a trainer that neither pauses nor opens a session the flush of all engines is the commit.
    """
    if at is None and fleet.update is not None and commits_by_flush(fleet.update, fleet.requested_pause):
        committed = await commit_open_update(fleet)
        if not committed.success:
            return committed
        # The commit has flushed the caches while no request ran. Requests run again now, and an engine refuses to flush while one runs.
        return Answer(200, "Cache flushed on all engines.", committed.fleet)
    if at is None and fleet.defers_pause:
        # Engines refuse to flush while requests run, and trainers repeat the call.
        return Answer(200, "The pause is deferred, so the engines flush their caches when they load the version.", {"deferred": True})
    names = [name for name in fleet.up() if at is None or name == at]
    _require_any(fleet, names, "there is no cache to flush")
    path = ControlCall.FLUSH_CACHE.path if ask.timeout is None else f"{ControlCall.FLUSH_CACHE.path}?timeout={ask.timeout:g}"
    boots = {name: fleet.boot(name) for name in names}
    results = await send(path, same_body(names), fleet.policy.deadlines.pause_seconds + (ask.timeout or 0))
    failed = await _find_failures(fleet, results, boots)
    if failed:
        name, result = next(iter(failed.items()))
        return Answer(400, f"engine {name} did not flush its cache: {result.message}", {"engines": results_by_engine(results)})
    message = "Cache flushed on all engines." if names else f"{NO_ENGINE_UP}, so there is no cache to flush."
    return Answer(200, message, {"engines": results_by_engine(results)})


def _require_any(fleet: Fleet, names: Collection[str], consequence: str) -> None:
    """Raise RefusedError if no engine is up. With transport Staged engines take no part in the trainer's push, so it continues."""
    if not names and not fleet.is_staged:
        raise RefusedError(describe_none_up(fleet, consequence), status=503)


async def set_label(fleet: Fleet, ask: SetLabel, _at: str | None = None) -> Answer:
    """Set the trainer's label for the version that its update becomes. Engines report it after the commit."""
    if fleet.update is not None:
        fleet.update.label = ask.label
    elif fleet.requested_pause is not None:
        fleet.transaction.label = ask.label
    return Answer(200, f"Weight version updated to {ask.label}")


async def new_run(fleet: Fleet, _ask: NewRun) -> Answer:
    """Let the next update begin a new run. Its step is not compared with earlier ones."""
    last = newest(fleet.committed, fleet.weights.reserved)
    fleet.weights.next_run = (last.run if last is not None else 0) + 1
    return Answer(200, f"The next update opens run {fleet.weights.next_run}.", {"next_run": fleet.weights.next_run})


async def claim(fleet: Fleet, _ask: Claim) -> Answer:
    """Let the caller hold the fleet, and own the process groups that are open. A pause of another trainer ends."""
    if fleet.requested_pause is not None and fleet.requested_pause.cause is Cause.TRAINER and not is_holder(fleet, fleet.caller):
        await abandon(fleet, UpdateReason.TAKEN_OVER, "another trainer took the fleet over")
    fleet.hold()
    fleet.membership.groups = {name: replace(group, author=fleet.holder) for name, group in fleet.groups.items()}
    return Answer(200, f"The fleet is held by {fleet.holder or 'this caller'}.", {"holder": fleet.holder, **fleet.advice()})


def find_group(fleet: Fleet, name: str | None) -> Group:
    """Return an open process group by name, or the only one if no name is given. Raises RefusedError if there is none."""
    if name is None and len(fleet.groups) == 1:
        return next(iter(fleet.groups.values()))
    if name is None:
        if not fleet.groups:
            raise RefusedError(_no_group(fleet), fleet=fleet.advice())
        names = ", ".join(fleet.groups)
        raise RefusedError(f"group_name is missing, and {len(fleet.groups)} process groups are open: name one of {names}.")
    if name not in fleet.groups:
        raise RefusedError(
            f"process group {name} is not open on this fleet{last_reason(fleet)}. Call init_weights_update_group with"
            f" world_size={fleet.table.world_size}.",
            fleet=fleet.advice(),
        )
    return fleet.groups[name]


def refuse_stale_group(fleet: Fleet, group: Group) -> None:
    """Raise RefusedError if a member of the process group does not run any more in the boot that joined."""
    changed = fleet.lost_engines(group.boots)
    if changed:
        raise RefusedError(
            f"process group {group.name} is of epoch {group.epoch} and its member, {describe_peer(changed[0])}, was restarted or is gone."
            f" Open a new process group with world_size={fleet.table.world_size}: the fleet is at epoch {fleet.epoch}.",
            fleet={**fleet.advice(), "reason": UpdateReason.ENGINE_LOST.value},
        )


def live_members(fleet: Fleet) -> dict[str, str]:
    """Return the members of all process groups that can still be used, with their boot IDs."""
    if not fleet.groups:
        raise RefusedError(_no_group(fleet), fleet=fleet.advice())
    live = [group for group in fleet.groups.values() if fleet.is_live(group)]
    if not live:
        refuse_stale_group(fleet, list(fleet.groups.values())[-1])
    return {name: boot for group in live for name, boot in group.boots.items()}


def _no_group(fleet: Fleet) -> str:
    return f"no process group is open{last_reason(fleet)}: call init_weights_update_group with world_size={fleet.table.world_size} first."
