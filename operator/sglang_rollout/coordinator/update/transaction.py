"""The calls of a weight update, from pause to resume, as operations over a set of groups."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sglang_rollout.coordinator.update.completeness import names_of, note_call, note_names, note_trust
from sglang_rollout.coordinator.update.interruption import Cause, Interruption
from sglang_rollout.coordinator.update.membership import refuse_asleep
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.outcome import FENCED, fail, finish, leave_behind
from sglang_rollout.coordinator.update.phases import Phase
from sglang_rollout.coordinator.update.progress import Group
from sglang_rollout.coordinator.update.progress import Update as OpenUpdate
from sglang_rollout.coordinator.update.ranks import Refusal
from sglang_rollout.coordinator.update.requests import Answer, Begin, Body, Continue, End, Flush, NewRun, Pause, SetLabel, Update
from sglang_rollout.coordinator.update.rules import last_reason, take_turn
from sglang_rollout.coordinator.update.steps import GRACE, failures, resume, same, send, soil, told
from sglang_rollout.coordinator.update.versions import newest
from sglang_rollout.sglang.api import ControlCall, MemoryTag, PauseMode
from sglang_rollout.wire.states import held_sentence


async def pause(fleet: Fleet, ask: Pause) -> Answer:
    """Pause every engine that runs, or none."""
    await take_turn(fleet, ask)
    failed = await hold_all(fleet, Cause.TRAINER, ask.mode, ask.body)
    return failed or Answer(200, "Generation paused successfully.", {"engines": list(fleet.up())})


async def hold_all(fleet: Fleet, cause: Cause, mode: str | None, body: Body) -> Answer | None:
    """Pause all engines that are up, or none of them."""
    refuse_asleep(fleet)
    names = fleet.up()
    if not names:
        raise Refusal("No engine of this fleet is up, so there is nothing to pause. Try again.", status=503)
    # Those whose memory is released are paused already.
    failed = await _halt(fleet, [name for name in names if not fleet.engines[name].released], names, body)
    if failed is None:
        fleet.interruptions.begin(Interruption(cause, mode=mode, engines=tuple(names), since=fleet.now))
    return failed


async def hold_late(fleet: Fleet, names: Collection[str]) -> Answer | None:
    """Pause those of these engines that the fleet's pause has missed: they came up since, or their agents ended it by their own lease."""
    hold = fleet.pause
    late = [name for name in names if not fleet.engines[name].released and not fleet.engines[name].paused]
    if hold is None or not late:
        return None
    both = tuple(dict.fromkeys([*hold.engines, *late]))
    failed = await _halt(fleet, late, [name for name in both if name in fleet.up()], {"mode": hold.mode} if hold.mode else {})
    if failed is None:
        hold.engines = both
    return failed


async def _halt(fleet: Fleet, running: Collection[str], names: Collection[str], body: Body) -> Answer | None:
    """Pause the engines that are running. If one fails, all of ``names`` go on."""
    fleet.enter(Phase.PAUSE)
    results = await send(ControlCall.PAUSE.path, same(running, body), fleet.policy.deadlines.pause_seconds)
    for name in running:
        if results[name].ok:
            fleet.engines[name].know(fleet.now, paused=True)
    failed = failures(results)
    if not failed:
        return None
    name, result = next(iter(failed.items()))
    reason = f"engine {name} could not be paused: {result.message}"
    if fleet.update is not None:
        return await fail(fleet, reason, results, engine=name)
    # Also those that failed: a call without an answer may have paused its engine.
    await resume(fleet, names)
    fleet.interruptions.end_pause()
    now = held_sentence(fleet.applied_state) or "All engines generate again."
    return Answer(400, f"{reason.rstrip('.')}. {now}", {"engine": name, "phase": "pause", "engines": told(results)})


async def resume_all(fleet: Fleet, ask: Continue) -> Answer:
    """Let the fleet run; for a trainer without a session this is the commit."""
    await take_turn(fleet, ask)
    update, committed = fleet.update, None
    if update is not None:
        if update.trainer_session:
            reason = "continue_generation came before end_weight_update"
            return await fail(fleet, reason)
        committed = await finish(fleet, tell=False)
        if not committed.success:
            return committed
    fleet.enter(Phase.RESUME)
    # Cleared before the call: whatever it brings, every engine ends resumed or fenced.
    fleet.interruptions.end_pause()
    fleet.transaction.label = None
    names = fleet.up()
    if not names:
        raise Refusal("No engine of this fleet is up, so nothing generates. Try again.", status=503)
    particulars = dict(committed.fleet) if committed is not None else {}
    behind = particulars.get(FENCED, {})
    results = await resume(fleet, [name for name in names if name not in behind], ask.body)
    # Success all the same: the trainer's own pause has ended, and unmodified trainers take anything else for a failed update.
    held = held_sentence(fleet.applied_state)
    message = f"Generation stays paused. {held}" if held else "Generation continued successfully."
    if committed is not None and behind:
        message = f"{message} {committed.message.removeprefix('Success: ')}"
    answer = Answer(200, message, {**particulars, "resumed": told(results), "state": fleet.applied_state.value})
    return await leave_behind(fleet, answer)


async def begin(fleet: Fleet, ask: Begin) -> Answer:
    """Open a session on every member of the open groups. From here on they are dirty until a complete update."""
    await take_turn(fleet, ask)
    failed = await tell(fleet, _members(fleet), ask.body, trainer_session=True)
    return failed or Answer(200, "Success", {**fleet.advice(), "version": str(fleet.target())})


async def update(fleet: Fleet, ask: Update) -> Answer:
    """Every member of the group receives these tensors, or the update fails as a whole."""
    await take_turn(fleet, ask)
    group = _group(fleet, ask.group)
    _check_live(fleet, group)
    session = {key: ask.body[key] for key in ("selector",) if key in ask.body}
    failed = await tell(fleet, group.boots, session)
    if failed is not None:
        return failed
    fleet.enter(Phase.TRANSFER)
    if fleet.update is not None:
        fleet.update.label = ask.label or fleet.update.label  # also a failure is told by the trainer's name for it
    body = {**ask.body, "group_name": group.name}
    if fleet.pause is not None and fleet.pause.mode == PauseMode.IN_PLACE:
        # In this mode requests keep their cache: SGLang would write the tensors and then answer 400 for the flush.
        body["flush_cache"] = False
    names = names_of(ask.body)
    new = note_names(fleet, names)
    results = await send(ControlCall.UPDATE_DISTRIBUTED.path, same(group.boots, body), fleet.policy.deadlines.update_seconds, grace=GRACE)
    if fleet.update is not None:
        note_call(fleet, fleet.update, names, new, results)
    broken = failures(results)
    if broken:
        name, result = next(iter(broken.items()))
        return await fail(fleet, f"engine {name} did not take the tensors: {result.message}", results, engine=name)
    state = fleet.require_update()
    state.data.add(group.name)
    state.fed.update(group.boots)
    # SGLang flushes unless it is told not to.
    state.flushed = state.flushed.union(group.boots) if body.get("flush_cache", True) else state.flushed.difference(group.boots)
    message = next(iter(results.values())).message or "Succeeded to update parameter online."
    return Answer(200, message, {"engines": told(results), "version": str(fleet.target())})


async def tell(fleet: Fleet, boots: Mapping[str, str], body: Body, *, trainer_session: bool = False) -> Answer | None:
    """Cross the boundary on these engines, pausing first: SGLang would wait for every running request otherwise."""
    open_update = fleet.update
    missing = {name: boot for name, boot in boots.items() if open_update is None or name not in open_update.boots}
    if not missing:
        return None
    refuse_asleep(fleet)
    for name in missing:
        engine = fleet.engines[name]
        if engine.status is not None and MemoryTag.WEIGHTS in engine.status.released:
            reason = f"engine {name} has released its weights: call resume_memory_occupation first."
            raise Refusal(reason, status=409, fleet=fleet.advice())
        if not engine.member:
            reason = f"engine {name} cannot take an update now: {engine.why_absent().rstrip('.')}."
            raise Refusal(reason, status=503, fleet=fleet.advice())
    if fleet.pause is None:
        mode = fleet.policy.pause_mode.sglang.value
        failed = await hold_all(fleet, Cause.UPDATE, mode, {"mode": mode})
    else:
        failed = await hold_late(fleet, missing)
    if failed is not None:
        return failed
    fleet.enter(Phase.OPEN)
    if fleet.update is None:
        fleet.transaction.update = OpenUpdate({}, fleet.now, fleet.transaction.label, trainer_session=trainer_session)
    # Noted before the call: an engine that was told and whose answer is lost takes part.
    update = fleet.require_update()
    update.boots.update(missing)
    note_trust(fleet, update, missing)
    results = await soil(fleet, ControlCall.BEGIN_UPDATE.path, same(missing, body), fleet.policy.deadlines.update_seconds, grace=GRACE)
    failed_calls = failures(results)
    if failed_calls:
        name, result = next(iter(failed_calls.items()))
        return await fail(fleet, f"engine {name} could not begin: {result.message}", results, engine=name)
    fleet.enter(Phase.TRANSFER)
    return None


async def end(fleet: Fleet, ask: End) -> Answer:
    """Commit the session's update."""
    await take_turn(fleet, ask)
    fleet.require_update().checksums = ask.checksums
    return await finish(fleet)


async def flush(fleet: Fleet, ask: Flush, only: Collection[str] | None = None) -> Answer:
    """Flush every engine's cache, or those of ``only`` these; for a trainer that neither pauses nor opens a session this is the commit."""
    await take_turn(fleet, ask)
    state, hold = fleet.update, fleet.pause
    if only is None and state is not None and not state.trainer_session and hold is not None and hold.cause is Cause.UPDATE:
        committed = await finish(fleet)
        if not committed.success:
            return committed
        # The commit has flushed, while nothing ran. Held requests run now, and an engine that runs any refuses to flush.
        return Answer(200, "Cache flushed on all engines.", committed.fleet)
    names = [name for name in fleet.up() if only is None or name in only]
    if not names:
        raise Refusal("No engine of this fleet is up, so there is no cache to flush. Try again.", status=503)
    path = ControlCall.FLUSH_CACHE.path if ask.timeout is None else f"{ControlCall.FLUSH_CACHE.path}?timeout={ask.timeout:g}"
    results = await send(path, same(names), fleet.policy.deadlines.pause_seconds + (ask.timeout or 0))
    failed = failures(results)
    if failed:
        name, result = next(iter(failed.items()))
        return Answer(400, f"engine {name} did not flush its cache: {result.message}", {"engines": told(results)})
    return Answer(200, "Cache flushed on all engines.", {"engines": told(results)})


async def set_label(fleet: Fleet, ask: SetLabel) -> Answer:
    """The trainer's name for the version that its update becomes; engines report it after the commit."""
    await take_turn(fleet, ask)
    if fleet.update is not None:
        fleet.update.label = ask.label
    elif fleet.pause is not None:
        fleet.transaction.label = ask.label
    return Answer(200, f"Weight version updated to {ask.label}")


async def new_run(fleet: Fleet, ask: NewRun) -> Answer:
    """The next update begins a new run: its numbers are not compared with those before."""
    await take_turn(fleet, ask)
    last = newest(fleet.committed, fleet.weights.reserved)
    fleet.weights.next_run = (last.run if last is not None else 0) + 1
    return Answer(200, f"The next update opens run {fleet.weights.next_run}.", {"next_run": fleet.weights.next_run})


def _group(fleet: Fleet, name: str | None) -> Group:
    if name is None and len(fleet.groups) == 1:
        return next(iter(fleet.groups.values()))
    if name is None:
        if not fleet.groups:
            raise Refusal(_no_group(fleet), fleet=fleet.advice())
        names = ", ".join(fleet.groups)
        raise Refusal(f"group_name is missing, and {len(fleet.groups)} groups are open: name one of {names}.")
    if name not in fleet.groups:
        raise Refusal(
            f"group {name} is not open on this fleet{last_reason(fleet)}. Call init_weights_update_group with"
            f" world_size={fleet.table.world_size}.",
            fleet=fleet.advice(),
        )
    return fleet.groups[name]


def _check_live(fleet: Fleet, group: Group) -> None:
    changed = fleet.changed(group.boots)
    if changed:
        raise Refusal(
            f"group {group.name} is of epoch {group.epoch} and its member {changed[0]} was restarted or is gone."
            f" Open a new group with world_size={fleet.table.world_size}: the fleet is at epoch {fleet.epoch}.",
            fleet=fleet.advice(),
        )


def _members(fleet: Fleet) -> dict[str, str]:
    """Members of all groups that can still be used."""
    if not fleet.groups:
        raise Refusal(_no_group(fleet), fleet=fleet.advice())
    live = [group for group in fleet.groups.values() if fleet.is_live(group)]
    if not live:
        _check_live(fleet, list(fleet.groups.values())[-1])
    return {name: boot for group in live for name, boot in group.boots.items()}


def _no_group(fleet: Fleet) -> str:
    return (
        f"no weight-update group is open{last_reason(fleet)}: call init_weights_update_group with"
        f" world_size={fleet.table.world_size} first."
    )
