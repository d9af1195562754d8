"""How an update ends: committed on every engine that takes part, or given up on all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sglang_rollout.coordinator.update.failed_commit import describe_failed_update
from sglang_rollout.coordinator.update.interruption import Cause
from sglang_rollout.coordinator.update.membership import engines_without_tensors, is_enough
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.phases import Phase, StagedUpdate, Update
from sglang_rollout.coordinator.update.proof import commit_names, drop_incomplete, find_dropped
from sglang_rollout.coordinator.update.requests import Answer
from sglang_rollout.coordinator.update.staging import kept_updates
from sglang_rollout.coordinator.update.steps import (
    FENCE_DEADLINE_SECONDS,
    PATIENCE_SECONDS,
    SYNC_DEADLINE_SECONDS,
    Results,
    failures,
    fence,
    reply,
    results_by_engine,
    same_body,
    send,
    sync,
    sync_and_resume,
    write,
)
from sglang_rollout.coordinator.update.store import STORE, leave_path
from sglang_rollout.coordinator.update.verify import should_verify, verify
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.agent import AckRequest
from sglang_rollout.wire.ports import AGENT_ACK, AGENT_DROP, STORE_DROP
from sglang_rollout.wire.record import EndedUpdate, UpdateOutcome, UpdateReason
from sglang_rollout.wire.states import EngineState, Version

MAX_REASON_CHARACTERS = 4000
"""Longest reason of the last update in the record. The trainer's answer has all of it."""
DROP_PATIENCE_SECONDS = 0.5
"""How much later than half of the agents another one may have deleted its copy, at least. The next call of the trainer waits for it."""
NAMES_AND_SHAPES = "names and shapes of tensors"
FENCED = "fenced"
"""Key in an answer: the engines that a commit left behind, each with the reason."""


async def end_sessions_and_commit(fleet: Fleet, *, answer_now: bool = True) -> Answer:
    """End the session on every engine and commit. Answers only after the gates are open.

    An engine that fails here is fenced alone if ``weights.minCommitted`` lets the others commit. Otherwise the whole update is given up.

    Args:
        fleet: The fleet, with an open update.
        answer_now: False: the caller does more before the trainer may hear of a commit, and then calls :func:`reply_and_fence_dropped`.
    """
    update = fleet.require_update()
    rest = [name for name in engines_without_tensors(fleet) if name not in update.received]
    if rest:
        return await fail_update(
            fleet, UpdateReason.INCOMPLETE, f"engine {rest[0]} had got no tensors of the update when it ended", engine=rest[0]
        )
    missing = missing_stages(fleet, update)
    if missing:
        reason = describe_missing_stage(missing[0])
        return await fail_update(fleet, UpdateReason.INCOMPLETE, reason)
    begin_verification(fleet, update)
    results = dict(await _end_session(fleet, update))
    return await verify_and_commit(fleet, update, results, answer_now=answer_now)


def begin_verification(fleet: Fleet, update: Update) -> None:
    """Enter the phase that ends the update. Engines that were restarted or lost do not commit."""
    fleet.enter(Phase.VERIFY)
    lost = fleet.lost_engines(update.boots)
    update.drop(dict.fromkeys(lost, "was restarted or lost in the middle of the update"), UpdateReason.ENGINE_LOST)


def describe_missing_stage(group: str) -> str:
    """Return that an update lacks the tensors of a process group, as a clause."""
    return f"process group {group} sent no tensors, although it belonged to the update before"


def missing_stages(fleet: Fleet, update: Update) -> list[str]:
    """Return the open process groups of this trainer that sent no tensors.

    The last update has shown which process groups belong to one trainer.
    """
    if not update.data or not update.data < fleet.weights.groups:
        return []
    return [name for name in sorted(fleet.weights.groups - update.data) if name in fleet.groups and fleet.is_live(fleet.groups[name])]


async def verify_and_commit(fleet: Fleet, update: Update, results: Results, *, answer_now: bool = True) -> Answer:
    """Verify and commit on the engines that may still commit, if they are enough. All tensors have arrived."""
    await drop_incomplete(fleet, update)
    dropped = find_dropped(fleet, update)
    if has_enough_engines(fleet, update) and (should_verify(fleet) or len(dropped)):
        update.drop(await verify(fleet, update.remaining()), UpdateReason.VERIFICATION_FAILED)
    if not has_enough_engines(fleet, update):
        return await _fail_for(fleet, update, results)
    # An engine whose memory is released has no cache and has computed nothing since.
    stale = [name for name in update.remaining() if name not in update.flushed and not fleet.engines[name].released]
    unflushed = await _flush(fleet, update, stale)
    if not has_enough_engines(fleet, update):
        return await _fail_for(fleet, update, results)
    answer = await _commit(fleet, [name for name in unflushed if name not in update.dropped])
    return (await reply_and_fence_dropped(fleet, answer)) if answer_now else answer


async def _end_session(fleet: Fleet, update: Update) -> Results:
    """End the session on the engines that may still commit. Drop those that cannot, or that received no tensors."""
    if not has_enough_engines(fleet, update):
        return {}
    inside = [name for name in update.remaining() if name not in update.ended]
    results = await send(ControlCall.END_UPDATE.path, same_body(inside), fleet.policy.deadlines.update_seconds, patience=PATIENCE_SECONDS)
    failed = {name: f"could not end the session: {result.message}" for name, result in failures(results).items()}
    update.drop(failed, UpdateReason.ENGINE_FAILED)
    without = [name for name in update.remaining() if name not in update.received]
    update.drop(dict.fromkeys(without, "had got no tensors of the update when it ended"), UpdateReason.INCOMPLETE)
    return results


def has_enough_engines(fleet: Fleet, update: Update) -> bool:
    """Return True if the engines that may still commit are as many as the policy asks for."""
    coming = len([name for name in engines_without_tensors(fleet) if name not in update.boots])
    return not update.dropped or is_enough(fleet, len(update.remaining()) + coming, len(update.boots) + coming)


async def _fail_for(fleet: Fleet, update: Update, results: Results) -> Answer:
    name, why = next(iter(update.dropped.items()))
    return await fail_update(fleet, update.reason, f"engine {name} {why}", results, engine=name)


async def _flush(fleet: Fleet, update: Update, names: list[str]) -> list[str]:
    """Flush the caches, which were computed with the old weights. Returns the engines that failed. Drops engines that do not answer.

    Several trainers send ``flush_cache: false`` with every bucket. SGLang would then continue a prompt that it has seen before from
    keys and values of the old weights, under the label of the new version. In pause mode ``in_place`` an engine with running requests
    refuses to flush: a trainer that chooses this mode accepts that.
    """
    if not names:
        return []
    results = await send(ControlCall.FLUSH_CACHE.path, same_body(names), fleet.policy.deadlines.pause_seconds, patience=PATIENCE_SECONDS)
    failed = failures(results)
    silent = {name: f"did not flush its cache: {result.message}" for name, result in failed.items() if result.status == 0}
    update.drop(silent, UpdateReason.ENGINE_FAILED)
    return list(failed)


async def _commit(fleet: Fleet, unflushed: list[str]) -> Answer:
    """Let every engine acknowledge, write the record, then open the gates and resume the fleet."""
    update = fleet.require_update()
    fleet.enter(Phase.COMMIT)
    version = fleet.target()
    results = await _acknowledge(fleet, update, version)
    if not has_enough_engines(fleet, update):
        # An engine may hold this version now and say so later: the pair (run, step) must never name other weights.
        fleet.weights.reserve([version])
        return await _fail_for(fleet, update, results)
    cohort, dropped = update.remaining(), dict(update.dropped)
    outcome = UpdateOutcome.PARTIAL if dropped else UpdateOutcome.COMMITTED
    commit_names(fleet, update, version, cohort, find_dropped(fleet, update))
    fleet.weights.groups = frozenset(update.data) or fleet.weights.groups
    fleet.transaction.close()
    fleet.weights.commits += 1
    for name in cohort:
        fleet.engines[name].tries, fleet.engines[name].note = 0, ""
    fleet.transaction.end(summarize_update(fleet, version, outcome, update, describe_dropped(dropped), engines=cohort))
    record = fleet.record()
    if record is not None:
        # If it cannot be written, the acknowledgements are the commit, and the record follows when the store can be reached again.
        await write(record)
    if fleet.pause is not None and fleet.pause.cause is Cause.UPDATE:
        fleet.enter(Phase.RESUME)
        synced = await sync_and_resume(fleet, [name for name in fleet.pause.engines if name not in dropped])
        fleet.interruptions.end_pause()
    else:
        synced = await sync(fleet)
    fleet.transaction.last = summarize_update(fleet, version, outcome, update, describe_dropped(dropped), engines=cohort)
    particulars = commit_particulars(fleet, version, {**results, **synced}) | {"outcome": outcome.value}
    if unflushed:
        particulars["cache_not_flushed"] = unflushed
    particulars |= unchecked_particulars(update)
    if not dropped:
        return Answer(200, f"Success. {update.unchecked}" if update.unchecked else "Success", particulars)
    return Answer(200, f"Success: {partial_message(fleet, dropped)}", {**particulars, FENCED: dropped})


def unchecked_particulars(update: Update) -> dict[str, object]:
    """Return what an answer says of names and shapes that were not compared with the model; empty if all were."""
    return {"unchecked": {"what": [NAMES_AND_SHAPES], "why": update.unchecked}} if update.unchecked else {}


def partial_message(fleet: Fleet, dropped: Mapping[str, str]) -> str:
    """Return the message about an update that was committed without the engines in ``dropped``."""
    last = fleet.last_update
    if last is None:
        raise RuntimeError("no update was committed")
    holding = f"{len(last.engines)} of {len(last.engines) + len(dropped)} engines hold version {last.version}"
    then = "load it from their copies" if fleet.is_staged else "stay closed until a complete update"
    return f"{holding}; the others {then}: {describe_dropped(dropped)}"


async def reply_and_fence_dropped(fleet: Fleet, answer: Answer, *, besides: Collection[str] = ()) -> Answer:
    """Answer the trainer, then fence the engines that its commit left behind. A hanging engine must not delay the answer.

    Args:
        fleet: The fleet.
        answer: The answer about the commit.
        besides: Engines that are fenced already.
    """
    dropped = {name: why for name, why in answer.fleet.get(FENCED, {}).items() if name not in besides}
    if dropped:
        await reply(answer)
        await fence(fleet, [name for name in dropped if _is_reachable(fleet, name)], describe_dropped(dropped))
    return answer


async def _acknowledge(fleet: Fleet, update: Update, version: Version) -> Results:
    """Ask every engine that may still commit to record that it holds the version. Drop those that do not."""
    cohort = update.remaining()
    bodies = {name: AckRequest(version=version, boot_id=update.boots[name], cohort=cohort).model_dump(mode="json") for name in cohort}
    results = await send(AGENT_ACK, bodies, fleet.policy.deadlines.pause_seconds, patience=PATIENCE_SECONDS, idempotent=True)
    for name in cohort:
        if not _acknowledged(results, name, version):
            said = results[name].message if name in results else "no answer"
            update.drop({name: f"did not acknowledge version {version}: {said}"}, UpdateReason.ENGINE_FAILED)
    return results


def _acknowledged(results: Results, name: str, version: Version) -> bool:
    """Return True if the engine's own status says that it holds the version. A 200 alone is no acknowledgement."""
    result = results.get(name)
    return (
        result is not None
        and result.ok
        and result.agent is not None
        and result.agent.state is EngineState.CLEAN
        and result.agent.version == version
    )


async def fail_update(
    fleet: Fleet,
    code: UpdateReason | None,
    reason: str,
    results: Results | None = None,
    *,
    engine: str | None = None,
    answer_now: bool = True,
) -> Answer:
    """Give up the open update: answer the trainer, then fence every engine that takes part or is paused.

    The answer comes first, because an engine that is blocked in a collective with the trainer comes free only when the trainer ends.

    Args:
        fleet: The fleet.
        code: Why, for programs.
        reason: Why, as a sentence for the trainer.
        results: What engines answered to the call that failed.
        engine: The engine that failed.
        answer_now: False: the caller of the operation asked for something else and gets its own answer.
    """
    phase, update, current = fleet.phase, fleet.update, fleet.requested_pause
    staged = update.staged if update is not None else None
    part = staged.called if staged is not None else update.boots if update is not None else ()
    names = list(dict.fromkeys([*part, *(fleet.pause.engines if fleet.pause else ())]))
    sentence = reason
    if update is not None:
        update.reason = code
        outcome = UpdateOutcome.ABORTED if code is UpdateReason.WITHDRAWN else UpdateOutcome.FAILED
        fleet.transaction.end(summarize_update(fleet, fleet.target(), outcome, update, reason))
        _reserve_staged(fleet, update)
        kept = f"The update was given up: version {fleet.committed} stays committed"
        sentence = f"{reason.rstrip('.')} (phase {phase.value}). {kept}{_way_out(fleet, update)}"
    elif current is not None:
        given_up = f"the pause was given up: {reason}"
        paused = Update({}, current.since, author=current.author, bytes=None, reason=code)
        fleet.transaction.end(summarize_update(fleet, fleet.target(), UpdateOutcome.ABORTED, paused, given_up))
    blamed = ({"engine": engine} if engine is not None else {}) | ({"reason": code.value} if code is not None else {})
    details = {"phase": phase.value, "cause": reason, "engines": results_by_engine(results or {})}
    answer = Answer(400, sentence, {**fleet.advice(), **blamed, **details})
    if update is not None and code is not UpdateReason.WITHDRAWN:
        fleet.transaction.failed = describe_failed_update(update, current, answer)
    fleet.transaction.close()
    fleet.interruptions.end_pause()
    if answer_now:
        await reply(answer)
    await fence(fleet, [name for name in names if _is_reachable(fleet, name)], reason)
    if staged is not None:
        await _drop_copies(fleet, staged)
    # Whatever follows, in this operation or another, is a new transaction with times of its own.
    fleet.enter(Phase.IDLE)
    return answer


async def _drop_copies(fleet: Fleet, staged: StagedUpdate) -> None:
    """Delete what the weight store and the engine pods have of a failed update. A pod that misses the call does so with the next update."""
    if fleet.is_up(STORE):
        await send(STORE_DROP, {STORE: {"keep": kept_updates(fleet)}}, SYNC_DEADLINE_SECONDS, idempotent=True)
    names = [name for name in fleet.engines if _is_reachable(fleet, name)]
    await send(AGENT_DROP, same_body(names, {"update": staged.id}), SYNC_DEADLINE_SECONDS, patience=DROP_PATIENCE_SECONDS)


def _reserve_staged(fleet: Fleet, update: Update) -> None:
    """Keep the number of a failed version from other weights if an engine has seen the version."""
    staged = update.staged
    if staged is None:
        return
    if staged.called:
        fleet.weights.reserve([staged.version])


def _way_out(fleet: Fleet, update: Update) -> str:
    """Return what a failed update leaves behind, and what the trainer can do, as the end of a sentence and another sentence."""
    if update.staged is not None:
        changed = (
            f", and engines that loaded the new one ({', '.join(update.staged.called[:8])}) load it again" if update.staged.called else ""
        )
        again = "" if update.reason is UpdateReason.TENSORS_MISSING else " Push again."
        return f"{changed}, and no other engine has changed.{again}" if changed else f", and no engine has changed.{again}"
    then = "push all tensors" if update.reason is UpdateReason.TENSORS_MISSING else "push again"
    return (
        f", and {', '.join(list(update.boots)[:8])} stay closed until a complete update."
        f" Open a new process group with world_size={fleet.table.world_size} and {then}."
    )


async def abandon(fleet: Fleet, code: UpdateReason, reason: str, *, close_groups: bool = False) -> Answer:
    """Give up the open update or pause, because its trainer is gone or starts again."""
    groups = [group for name, group in fleet.groups.items() if fleet.update is not None and name in fleet.update.data]
    answer = await fail_update(fleet, code, reason, answer_now=False)
    if close_groups:
        for group in groups:
            fleet.groups.pop(group.name, None)
            members = [name for name in group.boots if fleet.is_up(name) or _is_reachable(fleet, name)]
            await send(leave_path(members), same_body(members, {"group_name": group.name}), FENCE_DEADLINE_SECONDS)
    return answer


async def fence_strays(fleet: Fleet, names: list[str]) -> Answer:
    """End pauses and sessions that this coordinator did not open."""
    reason = "no coordinator leads the update that this engine takes part in: the coordinator was restarted, or the update was given up"
    await fence(fleet, [name for name in names if _is_reachable(fleet, name)], reason)
    return Answer(200, "Success")


def _is_reachable(fleet: Fleet, name: str) -> bool:
    engine = fleet.engines.get(name)
    return engine is not None and engine.reachable


def describe_dropped(dropped: Mapping[str, str]) -> str:
    """Return the engines that a commit left behind, each with the reason, as a phrase."""
    return "; ".join(f"engine {name} {why}" for name, why in dropped.items())


def last_reason(fleet: Fleet) -> str:
    """Return why the last update failed, as a parenthesis; empty if it did not."""
    last = fleet.last_update
    return f" ({last.message})" if last is not None and last.message else ""


def summarize_update(
    fleet: Fleet, version: Version, outcome: UpdateOutcome, update: Update, message: str, *, engines: Sequence[str] = ()
) -> EndedUpdate:
    """Return how an update ended, for the record."""
    return EndedUpdate(
        version=version, outcome=outcome, message=message[:MAX_REASON_CHARACTERS], finished=fleet.finished(), phases_ms=fleet.phases_ms(),
        engines=list(engines), author=update.author, bytes=update.bytes, reason=update.reason,
        update=update.staged.id if update.staged is not None else "",
        transferred=update.staged.transferred if update.staged is not None else None,
        unchecked=update.unchecked[:MAX_REASON_CHARACTERS],
    )  # fmt: skip


def commit_particulars(fleet: Fleet, version: Version, results: Results) -> dict[str, object]:
    """Return the details of an answer about a commit."""
    return {
        "epoch": fleet.epoch,
        "state": fleet.applied_state.value,
        "committed": version.model_dump(mode="json"),
        "phases_ms": fleet.phases_ms(),
        "engines": results_by_engine(results),
    }
