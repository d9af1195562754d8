"""How an update ends: committed on every engine that was told, or given up on all of them."""

from __future__ import annotations

from sglang_rollout.coordinator.update.completeness import committed, incomplete, look_up
from sglang_rollout.coordinator.update.interruption import Cause
from sglang_rollout.coordinator.update.membership import enough, untold
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.phases import Phase
from sglang_rollout.coordinator.update.progress import Update
from sglang_rollout.coordinator.update.requests import Answer
from sglang_rollout.coordinator.update.steps import (
    FENCE_DEADLINE,
    PATIENCE,
    Results,
    failures,
    fence,
    reply,
    run,
    same,
    send,
    sync,
    told,
    write,
)
from sglang_rollout.coordinator.update.verify import due, verify
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.agent import AckRequest
from sglang_rollout.wire.ports import AGENT_ACK
from sglang_rollout.wire.record import LastUpdate, UpdateOutcome
from sglang_rollout.wire.weights import EngineState, Version

LONGEST_REASON = 4000
"""Of the last update, in the record; the trainer's answer has all of it."""
FENCED = "fenced"
"""In an answer: the engines that a commit left behind, each with the reason."""


async def finish(fleet: Fleet, *, tell: bool = True) -> Answer:
    """End the session on every engine and commit. Answers only after the gates are open.

    An engine that fails here is fenced alone if ``weights.minCommitted`` lets the others commit; else the whole update
    is given up. Not ``tell``: the caller has more to do before the trainer may hear of a commit, and then calls :func:`leave_behind`.
    """
    update = fleet.require_update()
    rest = [name for name in untold(fleet) if name not in update.fed]
    if rest:
        return await fail(fleet, f"engine {rest[0]} had got no tensors of the update when it ended", engine=rest[0])
    missing = _missing_stages(fleet, update)
    if missing:
        reason = f"group {missing[0]} brought no tensors, although it belonged to the update before"
        return await fail(fleet, reason)
    fleet.enter(Phase.VERIFY)
    for name in fleet.changed(update.boots):
        update.dropped[name] = "was restarted or lost in the middle of the update"
    results = dict(await _end_session(fleet, update))
    return await close(fleet, update, results, tell=tell)


def _missing_stages(fleet: Fleet, update: Update) -> list[str]:
    """Open groups of this trainer that have brought nothing. Which groups are one trainer's, the last update has shown."""
    if not update.data or not update.data < fleet.weights.groups:
        return []
    return [name for name in sorted(fleet.weights.groups - update.data) if name in fleet.groups and fleet.is_live(fleet.groups[name])]


async def close(fleet: Fleet, update: Update, results: Results, *, tell: bool = True) -> Answer:
    """All tensors are where they should be: verify and commit on those that still stand, if they suffice."""
    await look_up(fleet, update)
    update.dropped |= incomplete(fleet, update)
    if suffice(fleet, update) and due(fleet):
        update.dropped |= await verify(fleet, update.standing())
    if not suffice(fleet, update):
        return await _fail_for(fleet, update, results)
    # One whose memory is released has no cache, and computed nothing since.
    stale = [name for name in update.standing() if name not in update.flushed and not fleet.engines[name].released]
    unflushed = await _flush(fleet, update, stale)
    if not suffice(fleet, update):
        return await _fail_for(fleet, update, results)
    answer = await _commit(fleet, [name for name in unflushed if name not in update.dropped])
    return (await leave_behind(fleet, answer)) if tell else answer


async def _end_session(fleet: Fleet, update: Update) -> Results:
    """End the session on those that still stand, and drop those that cannot, or that got no tensors."""
    if not suffice(fleet, update):
        return {}
    inside = [name for name in update.standing() if name not in update.ended]
    results = await send(ControlCall.END_UPDATE.path, same(inside), fleet.policy.deadlines.update_seconds, patience=PATIENCE)
    for name, result in failures(results).items():
        update.dropped[name] = f"could not end the session: {result.message}"
    for name in update.standing():
        if name not in update.fed:
            update.dropped[name] = "had got no tensors of the update when it ended"
    return results


def suffice(fleet: Fleet, update: Update) -> bool:
    """Whether the engines that may still commit are as many as the policy asks for."""
    coming = len([name for name in untold(fleet) if name not in update.boots])
    return not update.dropped or enough(fleet, len(update.standing()) + coming, len(update.boots) + coming)


async def _fail_for(fleet: Fleet, update: Update, results: Results) -> Answer:
    name, why = next(iter(update.dropped.items()))
    return await fail(fleet, f"engine {name} {why}", results, engine=name)


async def _flush(fleet: Fleet, update: Update, names: list[str]) -> list[str]:
    """Drop what was computed with the old weights; returns the engines that could not. One that is silent commits nothing.

    Several trainers send ``flush_cache: false`` with every bucket. A prompt that was seen before would then be continued
    from keys and values of the old weights, under the new version's name. In the mode in_place an engine that has running
    requests refuses, because they go on with what it holds: who chooses that, wants it.
    """
    if not names:
        return []
    results = await send(ControlCall.FLUSH_CACHE.path, same(names), fleet.policy.deadlines.pause_seconds, patience=PATIENCE)
    failed = failures(results)
    update.dropped |= {name: f"did not flush its cache: {result.message}" for name, result in failed.items() if result.status == 0}
    return list(failed)


async def _commit(fleet: Fleet, unflushed: list[str]) -> Answer:
    """Every engine acknowledges, then the record is written, then the gates open and the fleet runs."""
    update = fleet.require_update()
    fleet.enter(Phase.COMMIT)
    version = fleet.target()
    results = await _acknowledge(fleet, update, version)
    if not suffice(fleet, update):
        # Some engine may hold this version now and say so later: the pair (run, step) must never name other weights.
        fleet.weights.reserve([version])
        return await _fail_for(fleet, update, results)
    cohort, dropped = update.standing(), dict(update.dropped)
    outcome = UpdateOutcome.PARTIAL if dropped else UpdateOutcome.COMMITTED
    reason = "; ".join(f"engine {name} {why}" for name, why in dropped.items())
    committed(fleet, update, version)
    fleet.weights.groups = frozenset(update.data) or fleet.weights.groups
    fleet.transaction.close()
    fleet.weights.commits += 1
    for name in cohort:
        fleet.engines[name].tries, fleet.engines[name].note = 0, ""
    fleet.transaction.end(_last(fleet, version, outcome, reason, cohort))
    record = fleet.record()
    if record is not None:
        # Not written: the acknowledgements are the commit, and the record follows when the store can be reached again.
        await write(record)
    if fleet.pause is not None and fleet.pause.cause is Cause.UPDATE:
        fleet.enter(Phase.RESUME)
        synced = await run(fleet, [name for name in fleet.pause.engines if name not in dropped])
        fleet.interruptions.end_pause()
    else:
        synced = await sync(fleet)
    fleet.transaction.last = _last(fleet, version, outcome, reason, cohort)
    particulars = _particulars(fleet, version, {**results, **synced}) | {"outcome": outcome.value}
    if unflushed:
        particulars["cache_not_flushed"] = unflushed
    if not dropped:
        return Answer(200, "Success", particulars)
    fenced = f"the others serve nobody until a complete update: {reason}"
    message = f"Success: {len(cohort)} of {len(update.boots)} engines hold version {version}; {fenced}"
    return Answer(200, message, {**particulars, FENCED: dropped})


async def leave_behind(fleet: Fleet, answer: Answer) -> Answer:
    """Tell the trainer, then fence the engines that its commit left behind, if any: one that hangs must not hold the answer up."""
    dropped = answer.fleet.get(FENCED, {})
    if dropped:
        await reply(answer)
        reason = "; ".join(f"engine {name} {why}" for name, why in dropped.items())
        await fence(fleet, [name for name in dropped if _callable(fleet, name)], reason)
    return answer


async def _acknowledge(fleet: Fleet, update: Update, version: Version) -> Results:
    """Every engine that still stands records that it holds the version; drop those that do not say so."""
    cohort = update.standing()
    bodies = {name: AckRequest(version=version, boot_id=update.boots[name], cohort=cohort).model_dump(mode="json") for name in cohort}
    results = await send(AGENT_ACK, bodies, fleet.policy.deadlines.pause_seconds, patience=PATIENCE, idempotent=True)
    for name in cohort:
        if not _acknowledged(results, name, version):
            said = results[name].message if name in results else "no answer"
            update.dropped[name] = f"did not acknowledge version {version}: {said}"
    return results


def _acknowledged(results: Results, name: str, version: Version) -> bool:
    """Whether the engine's own status says that it holds the version: a 200 alone is no acknowledgement."""
    result = results.get(name)
    return (
        result is not None
        and result.ok
        and result.agent is not None
        and result.agent.state is EngineState.CLEAN
        and result.agent.version == version
    )


async def fail(fleet: Fleet, reason: str, results: Results | None = None, *, engine: str | None = None, tell: bool = True) -> Answer:
    """Give up the open update: tell the trainer, then fence every engine that was told or is paused.

    The trainer is told first: an engine that is blocked in a collective with it comes free only when the trainer goes.
    Not ``tell``: the caller of this operation asked for something else and gets its own answer.
    """
    phase, update, hold = fleet.phase, fleet.update, fleet.pause
    names = list(dict.fromkeys([*(update.boots if update else ()), *(hold.engines if hold else ())]))
    sentence = reason
    if update is not None:
        fleet.transaction.end(_last(fleet, fleet.target(), UpdateOutcome.FAILED, reason, []))
        sentence = (
            f"{reason.rstrip('.')} (phase {phase.value}). The update was given up: version {fleet.committed} stays committed, and"
            f" {', '.join(list(update.boots)[:8])} serve nobody until a complete update."
            f" Open a new group with world_size={fleet.table.world_size} and push again."
        )
    elif hold is not None:
        fleet.transaction.end(_last(fleet, fleet.target(), UpdateOutcome.ABORTED, f"the pause was given up: {reason}", []))
    fleet.transaction.close()
    fleet.interruptions.end_pause()
    blamed = {"engine": engine} if engine is not None else {}
    answer = Answer(400, sentence, {**fleet.advice(), **blamed, "phase": phase.value, "engines": told(results or {})})
    if tell:
        await reply(answer)
    await fence(fleet, [name for name in names if _callable(fleet, name)], reason)
    # What comes next, in this operation or another, is a new transaction with times of its own.
    fleet.enter(Phase.IDLE)
    return answer


async def abandon(fleet: Fleet, reason: str, *, close_groups: bool = False) -> Answer:
    """Give up whatever is open, because its trainer is gone or has begun anew."""
    groups = [group for name, group in fleet.groups.items() if fleet.update is not None and name in fleet.update.data]
    answer = await fail(fleet, reason, tell=False)
    if close_groups:
        for group in groups:
            fleet.groups.pop(group.name, None)
            members = [name for name in group.boots if _callable(fleet, name)]
            await send(ControlCall.DESTROY_GROUP.path, same(members, {"group_name": group.name}), FENCE_DEADLINE)
    return answer


async def tidy(fleet: Fleet, names: list[str]) -> Answer:
    """End pauses and sessions that nobody of this coordinator's life opened."""
    reason = "nobody leads the update that this engine is in: the coordinator was restarted, or the update was given up"
    await fence(fleet, [name for name in names if _callable(fleet, name)], reason)
    return Answer(200, "Success")


def _callable(fleet: Fleet, name: str) -> bool:
    engine = fleet.engines.get(name)
    return engine is not None and engine.reachable


def _last(fleet: Fleet, version: Version, outcome: UpdateOutcome, reason: str, engines: list[str]) -> LastUpdate:
    return LastUpdate(
        version=version, outcome=outcome, reason=reason[:LONGEST_REASON], finished=fleet.finished(), phases_ms=fleet.phases_ms(),
        engines=engines,
    )  # fmt: skip


def _particulars(fleet: Fleet, version: Version, results: Results) -> dict[str, object]:
    return {
        "epoch": fleet.epoch,
        "state": fleet.applied_state.value,
        "committed": version.model_dump(mode="json"),
        "phases_ms": fleet.phases_ms(),
        "engines": told(results),
    }
