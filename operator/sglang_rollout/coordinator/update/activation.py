"""How an update with transport Staged ends: complete at the weight store, copied into the engine pods, and loaded by the engines. Pure.

Until the record names the version, a failure changes nothing: the engines serve the version before. From then on the fleet only moves
forward: an engine that fails is fenced and loads its copy later (:mod:`.catch_up`).
"""

from __future__ import annotations

from collections.abc import Mapping

from sglang_rollout.coordinator.update.complete_push import WAY_OUT_STAGED, note_held_weights, read_model, rule_of, sent_tensors
from sglang_rollout.coordinator.update.completeness import Held
from sglang_rollout.coordinator.update.loading import (
    drop_failed,
    finish_roll,
    has_loaded_enough,
    load_groups,
    load_version,
    may_resume,
    note_loaded,
    return_to_service,
    waiting_engines,
)
from sglang_rollout.coordinator.update.membership import absent_sentence, describe_none_up, is_enough, required_engines
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.outcome import (
    FENCED,
    commit_particulars,
    describe_dropped,
    describe_missing_stage,
    fail_update,
    last_reason,
    missing_stages,
    partial_message,
    reply_and_fence_dropped,
    summarize_update,
    unchecked_particulars,
)
from sglang_rollout.coordinator.update.phases import Phase, StagedUpdate, Update
from sglang_rollout.coordinator.update.proof import commit_names, find_dropped
from sglang_rollout.coordinator.update.requests import Answer
from sglang_rollout.coordinator.update.rolling import describe_waiting, loads_in_turn
from sglang_rollout.coordinator.update.staging import parents_in_tree, require_staging, stage_body
from sglang_rollout.coordinator.update.steps import (
    Results,
    reply,
    same_body,
    send,
    sync,
    sync_and_resume,
    wait_until,
    write,
)
from sglang_rollout.coordinator.update.store import STORE
from sglang_rollout.wire.ports import AGENT_RUN, AGENT_STAGE, STORE_SEAL
from sglang_rollout.wire.reasons import RefusedError
from sglang_rollout.wire.record import UpdateOutcome, UpdateReason
from sglang_rollout.wire.staged import StoreSealRequest
from sglang_rollout.wire.states import FleetState, StagedVersion, Version

MARGIN_SECONDS = 5.0
"""How much longer than an agent may copy its answer may take."""
UPLOAD_WAIT_SECONDS = 25.0
"""How long the commit of an upload waits for engines. The client repeats the call, which no unmodified trainer makes."""
COPY_PATIENCE_SECONDS = 30.0
"""How much later than half of the pods another one may have the complete version, at least. It may also take as long as the update has
lasted: a pod whose agent was restarted copies the version once more from its beginning."""
RESUME_SECONDS = 3.0
"""Time for the first engine to generate again, before the others load: their gates are closed already."""
MAX_FAILED_CANARIES = 2
"""Engines that may fail after their first write before the update fails: the version itself may be what engines fail at."""


async def commit_staged(fleet: Fleet, *, answer_now: bool = True, answer_when_staged: bool = False) -> Answer:
    """Commit the open update, or give it up.

    Args:
        fleet: The fleet, with an open update whose tensors have arrived at the weight store.
        answer_now: False: the caller does more before the trainer may hear of a commit, and then calls :func:`reply_and_fence_dropped`.
        answer_when_staged: True: answer as soon as the weight store has the complete version.

    Raises:
        RefusedError: The upload lacks pieces, or no engine can take its version now; or memory of an engine is released. The update stays
            open.
    """
    update = fleet.require_update()
    staged = staged_part(update)
    failed = await _wait_and_complete(fleet, update, staged)
    if failed is None and answer_when_staged:
        await reply(staged_answer(fleet))
    if failed is None:
        await finish_roll(fleet)
    failed = failed or await _copy(fleet, update, staged) or await _load_canary(fleet, update, staged)
    if failed is not None:
        return failed
    await _write_commit(fleet, update, staged)
    await _load_rest(fleet, update, staged)
    answer = await _finish(fleet, update, staged)
    return (await reply_and_fence_dropped(fleet, answer, besides=staged.fenced)) if answer_now or not answer.success else answer


def staged_part(update: Update) -> StagedUpdate:
    """Return the weight store's part of an update. Raises RuntimeError if there is none: a bug."""
    if update.staged is None:
        raise RuntimeError("the update did not go to the weight store")
    return update.staged


def staged_answer(fleet: Fleet) -> Answer:
    """Return the answer for a trainer whose version is complete at the weight store, or waits for engines, and is not committed yet."""
    staged, version = staged_part(fleet.require_update()), fleet.target()
    then = "The weight store holds it completely, and the engines copy and load it now."
    if not staged.is_complete:
        then = "The weight store has its tensors. Too few engines are up to commit it: they load it when they are up."
    message = f"Success: version {version} is staged. {then} GET /fleet shows when it is committed."
    details = {"update": staged.id, "version": str(version), "digest": staged.digest, "epoch": fleet.epoch}
    return Answer(200, message, {"state": "staged", **details})


# --- STAGE -----------------------------------------------------------------------------------------------------------


async def _wait_and_complete(fleet: Fleet, update: Update, staged: StagedUpdate) -> Answer | None:
    """Wait for engines, and declare the version complete. Returns the answer for the trainer if the update failed.

    A trainer without uploads that had to wait has received a success, so what would be refused fails the update then.
    """
    had_to_wait = not staged.is_upload and not _has_enough_members(fleet)
    failed = await _wait_for_engines(fleet, update, staged)
    try:
        return failed or await _complete(fleet, update, staged)
    except RefusedError as error:
        if not had_to_wait or fleet.update is not update:
            raise
        return await fail_update(fleet, UpdateReason.ENGINE_FAILED, str(error))


async def _wait_for_engines(fleet: Fleet, update: Update, staged: StagedUpdate) -> Answer | None:
    """Wait until enough engines are up for a commit. Returns the answer for the trainer if the update failed.

    Engines may all restart at the same time, and an unmodified trainer ends if its commit is refused. So its call is answered after some
    seconds (by :mod:`.machine`): the version is staged, and the wait continues. The commit of an upload is refused after these seconds,
    and the upload stays open: the client repeats the call.
    """
    if _has_enough_members(fleet):
        return None
    staged.is_waiting = not staged.is_upload
    limit = UPLOAD_WAIT_SECONDS if staged.is_upload else fleet.policy.deadlines.stage_seconds
    try:
        await wait_until(lambda: fleet.update is not update or _has_enough_members(fleet) or not _may_engines_come(fleet), limit)
    finally:
        staged.is_waiting = False
    if fleet.update is not update:
        cause = f"The update ended while its commit waited for engines{last_reason(fleet)}."
        raise RefusedError(f"{cause} Push again.", status=409, fleet={"cause": cause})
    if staged.is_upload or _has_enough_members(fleet):
        return None
    why = f"too few engines were up for {limit:g} s (weights.deadlines.stageSeconds). {absent_sentence(fleet)}"
    if not _may_engines_come(fleet):
        why = "no engine comes up that could load the version, because spec.state or spec.replicas has changed."
    return await fail_update(fleet, UpdateReason.ENGINE_LOST, why)


def _may_engines_come(fleet: Fleet) -> bool:
    return bool(fleet.engines) and fleet.interruptions.desired_state is not FleetState.ASLEEP


def _has_enough_members(fleet: Fleet) -> bool:
    there = len(fleet.members())
    return is_enough(fleet, there, there)


async def _complete(fleet: Fleet, update: Update, staged: StagedUpdate) -> Answer | None:
    """Declare the version complete at the weight store. Returns the answer for the trainer if the update failed."""
    members = _require_ready_members(fleet)
    fleet.enter(Phase.STAGE)
    update.held = {}
    note_held_weights(fleet, update, members)
    boots = {name: boot for name in members if (boot := fleet.boot(name)) is not None}
    lacking = await _find_missing(fleet, update, members)
    if lacking is not None:
        return await fail_update(fleet, *lacking)
    version = fleet.target()
    body = StoreSealRequest(update=staged.id, version=version).model_dump(mode="json")
    result = (await send(STORE_SEAL, {STORE: body}, fleet.policy.deadlines.update_seconds, idempotent=True))[STORE]
    if not result.ok and staged.is_upload and result.status == 409:
        raise RefusedError(f"The upload cannot be committed: {result.message}", status=409)
    copies = result.store.copies if result.store is not None else []
    copy = next((copy for copy in copies if copy.update == staged.id and copy.digest), None)
    if copy is None:
        why = result.message.rstrip(".") or "its answer does not have the complete version"
        return await fail_update(fleet, UpdateReason.STORE_FAILED, f"the weight store could not complete the version: {why}")
    staged.version, staged.digest, staged.bytes, update.bytes = version, copy.digest, copy.bytes, copy.bytes
    staged.transferred = copy.transferred
    update.boots = boots  # only now, because an update whose commit is refused does not depend on engines
    return None


def _require_ready_members(fleet: Fleet) -> list[str]:
    """Return the engines that can take the version. Raises RefusedError if they are too few, or if memory of one is released."""
    members = fleet.members()
    if not members:
        raise RefusedError(describe_none_up(fleet, "none can load the version, and the update stays open"), status=503)
    least = required_engines(fleet.policy.min_committed, len(fleet.engines), len(members))
    if len(members) < least:
        up = f"{len(members)} of {len(fleet.engines)} engines are up, and weights.minCommitted asks for {least}."
        raise RefusedError(f"{up} {absent_sentence(fleet)} The update stays open. Try again.", status=503)
    released = [name for name, engine in members.items() if engine.released]
    if released:
        reason = f"engine {released[0]} has released memory: call resume_memory_occupation first. The update stays open."
        raise RefusedError(reason, status=409, fleet=fleet.advice())
    return list(members)


async def _find_missing(fleet: Fleet, update: Update, members: list[str]) -> tuple[UpdateReason, str] | None:
    """Return what the version lacks, as a code and a clause; None if it is complete.

    An engine that restarts loads the version over what ``model.path`` holds. So the version needs every tensor that any push of this run
    has announced.
    """
    sent = sent_tensors(update)
    if not sent:
        return UpdateReason.INCOMPLETE, "no tensors had come when the update ended"
    groups = missing_stages(fleet, update)
    if groups:
        return UpdateReason.INCOMPLETE, describe_missing_stage(groups[0])
    rule = rule_of(fleet, update, await read_model(fleet))
    blank = any(update.held[name].blank for name in members)
    lacking = rule.find_lacking(Held(base=rule.opens_run, blank=blank))  # engines with other tensors restart, and load their copies then
    return (UpdateReason.TENSORS_MISSING, f"the version lacks {lacking}: {WAY_OUT_STAGED}") if lacking is not None else None


async def _copy(fleet: Fleet, update: Update, staged: StagedUpdate) -> Answer | None:
    """Wait until the pods of all engines have the version. Engines without it are dropped."""
    tree = parents_in_tree(list(update.boots), require_staging(fleet).fanout)
    bodies = {name: stage_body(fleet, staged.id, parents, digest=staged.digest) for name, parents in tree.items()}
    limit = fleet.policy.deadlines.stage_seconds + MARGIN_SECONDS
    patience = max(COPY_PATIENCE_SECONDS, fleet.now - update.started)
    results = await send(AGENT_STAGE, bodies, limit, patience=patience, idempotent=True)
    await drop_failed(fleet, update, staged, results, "did not copy the version")
    return await _fail_unless_enough(fleet, update, staged, results)


def has_enough(fleet: Fleet, update: Update, staged: StagedUpdate) -> bool:
    """Return True if the engines that may hold the version are as many as the policy asks for. Engines that are gone do not count."""
    return is_enough(fleet, len(update.remaining()), len(update.boots.keys() - staged.lost))


async def _fail_unless_enough(fleet: Fleet, update: Update, staged: StagedUpdate, results: Results) -> Answer | None:
    if has_enough(fleet, update, staged):
        return None
    name, why = next(iter(update.dropped.items()))
    return await fail_update(fleet, update.reason, f"engine {name} {why}", results, engine=name)


# --- CANARY ----------------------------------------------------------------------------------------------------------


async def _load_canary(fleet: Fleet, update: Update, staged: StagedUpdate) -> Answer | None:
    """Let one engine load the version. Returns the answer for the trainer if none can.

    An engine that refuses before its first write serves on, and the next one is tried. In a new run all may refuse, because the version
    lacks tensors that they hold: it is committed then, and they restart and load it.
    """
    fleet.enter(Phase.CANARY)
    failed_canaries = 0
    while True:
        name = _next_canary(fleet, update)
        results = await load_version(fleet, update, staged, [name])
        result = results[name]
        if result.ok:
            update.has_changed_nothing = not result.changed and update.held[name].committed
            wrong = await note_loaded(fleet, update, staged, results)
            return (
                await fail_update(fleet, UpdateReason.VERIFICATION_FAILED, f"engine {name} {wrong[name]}", engine=name) if wrong else None
            )
        await drop_failed(fleet, update, staged, results, "did not load the version")
        if fleet.weights.opens_run and staged.restarting and not update.remaining():
            return None  # no engine can try the version before all of them restart
        failed = await _fail_unless_enough(fleet, update, staged, results)
        failed_canaries += result.wrote
        if failed is not None:
            return failed
        if failed_canaries >= MAX_FAILED_CANARIES:
            why = f"{failed_canaries} engines failed while they loaded the version; the last is engine {name}: {result.message}"
            return await fail_update(fleet, UpdateReason.ENGINE_FAILED, why, results, engine=name)


def _next_canary(fleet: Fleet, update: Update) -> str:
    """Return the engine that loads the version first: one that holds the committed version, because it has shown that it works."""
    remaining = update.remaining()
    committed = fleet.committed
    return next((name for name in remaining if committed is not None and fleet.engines[name].holds(committed)), remaining[0])


# --- ACTIVATE, COMMIT ------------------------------------------------------------------------------------------------


async def _write_commit(fleet: Fleet, update: Update, staged: StagedUpdate) -> None:
    """Commit the version: write it to the record, with what identifies its contents.

    If the record cannot be written, it follows when it can: agents hear of the version with the next sync, which proves it.
    """
    fleet.enter(Phase.ACTIVATE)
    version = fleet.target()
    commit_names(fleet, update, version, (), find_dropped(fleet, update))
    weights = fleet.weights
    weights.staged = StagedVersion(update=staged.id, digest=staged.digest, bytes=staged.bytes)
    weights.checksums = dict(staged.checksums)
    weights.groups = frozenset(update.data) or weights.groups
    record = fleet.record()
    if record is not None:
        await write(record)


async def _load_rest(fleet: Fleet, update: Update, staged: StagedUpdate) -> None:
    """Let the other engines load the version, all at once or in turn. Drops those that fail.

    In turn: until ``weights.minCommitted`` engines have loaded it. The coordinator continues without a request (:func:`load_committed`).
    The engine that has loaded it first generates meanwhile, unless the fleet is paused.
    """
    if loads_in_turn(fleet):
        await return_to_service(fleet, update, staged, only_these=False)
    elif may_resume(fleet):
        await _resume_first(fleet, update, staged)
    await load_groups(fleet, update, staged, is_open=True)
    fleet.weights.checksums = dict(staged.checksums)
    fleet.weights.commits += 1


async def _resume_first(fleet: Fleet, update: Update, staged: StagedUpdate) -> None:
    """Let the engine generate that has loaded the version first. If it takes long, the others load meanwhile, and it resumes with them."""
    first = [name for name in staged.loaded if name not in update.dropped]
    results = await send(AGENT_RUN, same_body(first, fleet.sync_request().model_dump(mode="json")), RESUME_SECONDS)
    for name in (name for name, result in results.items() if result.ok and name in fleet.engines):
        fleet.engines[name].anticipate(fleet.next_seq(), paused=False)
        staged.running.append(name)


async def _finish(fleet: Fleet, update: Update, staged: StagedUpdate) -> Answer:
    """Note how the update ended, open the gates, and let the engines generate again unless the trainer has paused them."""
    version = fleet.target()
    fleet.enter(Phase.COMMIT)
    waiting, dropped, enough = waiting_engines(update, staged), dict(update.dropped), has_loaded_enough(fleet, update, staged)
    loaded = [name for name in update.remaining() if name not in waiting]
    update.reason = update.reason if enough else UpdateReason.TOO_FEW_ENGINES
    outcome = UpdateOutcome.PARTIAL if dropped or not enough else UpdateOutcome.COMMITTED
    for name in loaded:
        fleet.engines[name].tries, fleet.engines[name].note = 0, ""
    fleet.transaction.close()
    fleet.transaction.end(summarize_update(fleet, version, outcome, update, describe_dropped(dropped), engines=loaded))
    synced = await _open_gates(fleet, [name for name in loaded if name not in staged.running], keeps_pause=enough)
    fleet.transaction.last = summarize_update(fleet, version, outcome, update, describe_dropped(dropped), engines=loaded)
    particulars = {**commit_particulars(fleet, version, synced), "outcome": outcome.value, "state": "committed", "update": staged.id}
    particulars["digest"] = staged.digest
    if unflushed := [name for name in staged.unflushed if name in loaded]:
        particulars["cache_not_flushed"] = unflushed
    particulars |= unchecked_particulars(update)
    if waiting:
        particulars["waiting"] = waiting
    if enough:
        notes = [partial_message(fleet, dropped).rstrip(".") if dropped else "", describe_waiting(waiting, version) if waiting else ""]
        message = ": ".join(filter(None, ["Success", "; ".join(filter(None, notes))]))
        message += f". {update.unchecked}" if update.unchecked else ""
        return Answer(200, message, particulars | ({FENCED: dropped} if dropped else {}))
    cause = _describe_too_few(version, loaded, waiting, dropped)
    message = (
        f"{cause} The fleet moves forward: the other engines load the version from their copies and serve again then. Do not push it again."
    )
    return Answer(500, message, {**particulars, FENCED: dropped, "reason": UpdateReason.TOO_FEW_ENGINES.value, "cause": cause})


async def _open_gates(fleet: Fleet, loaded: list[str], *, keeps_pause: bool) -> Results:
    """Send all agents the committed version, and resume the engines that have loaded it, unless the trainer's pause continues."""
    pause = fleet.pause
    if pause is not None and keeps_pause:
        pause.engines = tuple(dict.fromkeys([*pause.engines, *loaded]))
        return await sync(fleet)
    fleet.enter(Phase.RESUME)
    fleet.interruptions.end_pause()
    return await sync_and_resume(fleet, dict.fromkeys([*(pause.engines if pause is not None else ()), *loaded]))


def _describe_too_few(version: Version, loaded: list[str], waiting: list[str], dropped: Mapping[str, str]) -> str:
    stopped = f" More engines have failed than loaded it, so engines wait and serve an older version: {', '.join(waiting[:8])}."
    return (
        f"version {version} is committed, but only {len(loaded)} of {len(loaded) + len(waiting) + len(dropped)} engines have loaded it,"
        f" fewer than weights.minCommitted asks for: {describe_dropped(dropped)}.{stopped if waiting else ''}"
    )
