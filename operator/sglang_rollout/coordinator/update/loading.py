"""Engines load a staged version from the copies in their pods: one group after the other, or all at once. Pure.

:mod:`.activation` calls this for an open update, and :mod:`.machine` for engines that still serve an older version. Which engines load
next is decided in :mod:`.rolling`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sglang_rollout.api.weights_spec import Verify
from sglang_rollout.coordinator.update.engine import Engine
from sglang_rollout.coordinator.update.events import Result
from sglang_rollout.coordinator.update.membership import is_enough
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.outcome import describe_dropped
from sglang_rollout.coordinator.update.phases import StagedUpdate, Update
from sglang_rollout.coordinator.update.requests import Answer, Body
from sglang_rollout.coordinator.update.rolling import find_waiting, loads_in_turn, next_group, serves_older
from sglang_rollout.coordinator.update.steps import (
    SLOWEST_FACTOR,
    Results,
    failures,
    fence,
    find_lost,
    same_body,
    send_and_mark_dirty,
    sync_and_resume,
)
from sglang_rollout.coordinator.update.verify import should_verify
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.sglang.checksums import Checksums, find_difference
from sglang_rollout.wire.agent import AckRequest, AgentStatus
from sglang_rollout.wire.ports import AGENT_ACTIVATE
from sglang_rollout.wire.reasons import RefusalCode
from sglang_rollout.wire.record import UpdateReason
from sglang_rollout.wire.staged import ActivateRequest
from sglang_rollout.wire.states import EngineState, FleetState, StagedVersion

MARGIN_SECONDS = 5.0
"""How much longer than an agent may load its answer may take."""
LOAD_PATIENCE_SECONDS = 60.0
"""How much later than half of the engines another one may have loaded the version, at least."""


async def load_version(fleet: Fleet, update: Update, staged: StagedUpdate, names: list[str], *, resumes: bool = False) -> Results:
    """Let engines load the version, and note which engines may have changed.

    ``resumes``: True if the version is committed, and each engine may generate again as soon as it has loaded it.
    """
    if staged.version is None:
        raise RuntimeError("no engine loads a version that is not complete")
    wanted = StagedVersion(update=staged.id, digest=staged.digest, bytes=staged.bytes)
    cohort = update.remaining()
    acks = {name: AckRequest(version=staged.version, boot_id=update.boots[name], cohort=cohort) for name in names}
    expected = {name: _expected(fleet, update, staged, name) for name in names}
    staged.called += [name for name in names if name not in staged.called]
    results = await activate(fleet, wanted, acks, expected, checksums=should_verify(fleet), resumes=resumes, seconds=_load_limit(fleet))
    staged.called = [name for name in staged.called if name not in results or results[name].wrote]
    return results


def _load_limit(fleet: Fleet) -> float | None:
    """Return the time for a load in turn, in which a hanging engine delays all others; None: the policy's."""
    known, longest = fleet.weights.load_seconds, fleet.policy.deadlines.activate_seconds
    return min(longest, max(LOAD_PATIENCE_SECONDS, SLOWEST_FACTOR * known)) if known is not None and loads_in_turn(fleet) else None


def _expected(fleet: Fleet, update: Update, staged: StagedUpdate, name: str) -> Checksums | None:
    size = fleet.engines[name].tensor_size
    return update.checksums.get(size) or staged.checksums.get(size)


async def activate(
    fleet: Fleet,
    version: StagedVersion,
    acks: Mapping[str, AckRequest],
    expected: Mapping[str, Checksums | None],
    *,
    checksums: bool,
    resumes: bool = False,
    seconds: float | None = None,
) -> Results:
    """Let engines load their copies of a version, all at once, and acknowledge it.

    Args:
        fleet: The fleet.
        version: What the copies must be.
        acks: The acknowledgement of each engine.
        expected: Checksums that each engine must have afterwards; None: not known.
        checksums: True: engines return their checksums.
        resumes: True: an engine that has loaded the version generates again. One whose checksums only the coordinator can judge stays
            paused, and so do all engines if this is False.
        seconds: Time for the load; None: the policy's.
    """
    bodies: dict[str, Body] = {}
    sync = fleet.sync_request() if resumes else None
    for name, ack in acks.items():
        wanted = expected.get(name)
        is_judged = wanted is not None or not checksums
        request = ActivateRequest(
            update=version.update, digest=version.digest, ack=ack, mode=fleet.pause_mode,
            checksums=checksums or wanted is not None, expected=list(wanted) if wanted is not None else None,
            sync=sync if is_judged else None,
        )  # fmt: skip
        bodies[name] = request.model_dump(mode="json")
    engines = {name: fleet.engines[name] for name in bodies}
    before = {name: engine.status for name, engine in engines.items()}
    began, limit = fleet.now, (seconds or fleet.policy.deadlines.activate_seconds) + MARGIN_SECONDS
    results = await send_and_mark_dirty(fleet, AGENT_ACTIVATE, bodies, limit, patience=LOAD_PATIENCE_SECONDS)
    if all(result.ok for result in results.values()):  # the time of an engine that hangs is no measure for the next group
        fleet.weights.load_seconds = fleet.now - began
    for name, result in results.items():
        _note_result(fleet, engines[name], before[name], acks[name], result)
    return results


def _note_result(fleet: Fleet, engine: Engine, before: AgentStatus | None, ack: AckRequest, result: Result) -> None:
    """Note what an engine holds after a load. ``before``: its status before the load."""
    if result.ok:
        engine.failed_version = None
    elif result.wrote:
        engine.failed_version = ack.version
    if before is None or engine.boot != before.boot_id:
        return  # the status is of another run of the engine already
    if result.ok:
        held = {"state": EngineState.CLEAN, "version": ack.version, "cohort": ack.cohort}
        engine.anticipate(fleet.next_seq(), **held, paused=not result.running, session=False)
    elif not result.wrote:
        engine.status, engine.changed_seq = before, fleet.next_seq()


async def note_loaded(fleet: Fleet, update: Update, staged: StagedUpdate, results: Results) -> dict[str, str]:
    """Note which engines have loaded the version. Drops and returns those that hold other weights, and why.

    Agents compare, too, and then do not acknowledge. These engines acknowledged, so they are made dirty before they are fenced.
    """
    verifies, wrong = should_verify(fleet), {}
    for name in (name for name, result in results.items() if result.ok):
        size, found = fleet.engines[name].tensor_size, results[name].checksums
        expected = _expected(fleet, update, staged, name)
        if found is None and (verifies or expected is not None):
            wrong[name] = "could not be verified: its agent returned no checksums (weights.verify Off commits without)"
        elif found is not None and expected is not None and found != expected:
            wrong[name] = f"holds other weights than it should ({find_difference(expected, found)})"
        elif found is not None:
            staged.checksums[size] = found
    update.drop(wrong, UpdateReason.VERIFICATION_FAILED)
    staged.loaded += [name for name, result in results.items() if result.ok and name not in wrong]
    staged.running += [name for name, result in results.items() if result.ok and result.running and name not in wrong]
    staged.unflushed += [name for name, result in results.items() if result.ok and not result.flushed]
    await send_and_mark_dirty(fleet, ControlCall.BEGIN_UPDATE.path, same_body(wrong), fleet.policy.deadlines.pause_seconds)
    return wrong


async def drop_failed(fleet: Fleet, update: Update, staged: StagedUpdate, results: Results, what: str) -> None:
    """Drop the engines that failed, and note which of them are gone.

    An engine that was restarted, drained or lost, or that has to restart, is no reason to fail an update: it loads the version when it is
    back.
    """
    failed = failures(results)
    if not failed:
        return
    staged.restarting |= {name for name, result in failed.items() if result.code is RefusalCode.RESTART_NEEDED}
    lost = await find_lost(fleet, failed, update.boots) | (staged.restarting & failed.keys())
    staged.lost |= lost
    for names, code in ((failed.keys() - lost, UpdateReason.ENGINE_FAILED), (lost, UpdateReason.ENGINE_LOST)):
        texts = {name: _describe_restart(fleet, name) if name in staged.restarting else what for name in failed}
        update.drop({name: f"{texts[name]}: {failed[name].message}" for name in failed if name in names}, code)


def _describe_restart(fleet: Fleet, name: str) -> str:
    who = "which its agent requests" if fleet.engines[name].restarts else "and its agent cannot restart it: do that by hand"
    return f"has to restart before it loads the version, {who}"


async def load_groups(fleet: Fleet, update: Update, staged: StagedUpdate, *, is_open: bool) -> None:
    """Let group after group load the version. In turn, each group serves again before the next one begins.

    Engines that load all at once for a trainer generate again as soon as they have loaded the version, unless the fleet is paused.

    Args:
        fleet: The fleet.
        update: The update whose version is loaded.
        staged: Its part about the weight store.
        is_open: True if it is the open update, whose trainer waits until enough engines have loaded the version.
    """
    while True:
        in_turn = loads_in_turn(fleet)
        if in_turn:
            _drop_lost(fleet, update, staged)
        group = next_group(fleet, waiting_engines(update, staged))
        if not group or (
            is_open and in_turn and all(serves_older(fleet, name) for name in group) and has_loaded_enough(fleet, update, staged)
        ):
            return
        wave = _next_wave(fleet, update, staged, group)
        results = await load_version(fleet, update, staged, wave, resumes=is_open and not in_turn and may_resume(fleet))
        await note_loaded(fleet, update, staged, results)
        await drop_failed(fleet, update, staged, results, "did not load the version")
        if in_turn or not is_open:
            await return_to_service(fleet, update, staged)
            staged.fenced |= {name for name in wave if name in update.dropped}
            failed = {name: update.dropped[name] for name in wave if name in update.dropped and fleet.engines[name].reachable}
            await fence(fleet, failed, describe_dropped(failed))


def may_resume(fleet: Fleet) -> bool:
    """Return True if an engine may generate again as soon as it holds the committed version: neither trainer nor spec pauses the fleet."""
    return fleet.pause is None and fleet.applied_state is FleetState.ACTIVE


def _drop_lost(fleet: Fleet, update: Update, staged: StagedUpdate) -> None:
    """Drop waiting engines that were restarted or do not answer, so that their load delays no other engine."""
    lost = [name for name in waiting_engines(update, staged) if not fleet.is_up(name) or fleet.boot(name) != update.boots[name]]
    staged.lost |= set(lost)
    update.drop(dict.fromkeys(lost, "was restarted or lost before it loaded the version"), UpdateReason.ENGINE_LOST)


async def return_to_service(fleet: Fleet, update: Update, staged: StagedUpdate, *, only_these: bool = True) -> None:
    """Open the gates of the engines that have loaded the version, and let them generate, before other engines load it."""
    done = [name for name in staged.loaded if name not in staged.running and name not in update.dropped]
    staged.running += done
    await sync_and_resume(fleet, done, only_these=only_these)


def waiting_engines(update: Update, staged: StagedUpdate) -> list[str]:
    """Return the engines that may still load the version of an update and have not loaded it."""
    return [name for name in update.remaining() if name not in staged.loaded]


def has_loaded_enough(fleet: Fleet, update: Update, staged: StagedUpdate) -> bool:
    """Return True if the engines that have loaded the version are as many as the policy asks for."""
    loaded = [name for name in update.remaining() if name in staged.loaded]
    taking_part = update.boots.keys() - staged.lost
    return is_enough(fleet, len(loaded), len(taking_part)) or bool(staged.restarting and not taking_part)


def _next_wave(fleet: Fleet, update: Update, staged: StagedUpdate, rest: Iterable[str]) -> list[str]:
    """Return the engines that load now. Of a tensor size without known checksums one engine is first, and the others are compared to it."""
    found: list[str] = []
    leading: set[int] = set()
    for name in rest:
        size = fleet.engines[name].tensor_size
        if not should_verify(fleet) or _expected(fleet, update, staged, name) is not None or size not in leading:
            found.append(name)
            leading.add(size)
    return found


async def finish_roll(fleet: Fleet) -> None:
    """Let the engines that still wait load the committed version, before a next one is committed: no engine falls two versions behind."""
    if loads_in_turn(fleet) and (names := find_waiting(fleet)):
        await load_committed(fleet, names)


async def load_committed(fleet: Fleet, names: Iterable[str]) -> Answer:
    """Let engines that serve an older version load the committed one from their copies, and serve again.

    Engines that fail are fenced and try again later.
    """
    version, found = fleet.committed, fleet.weights.staged
    boots = {name: boot for name in names if (boot := fleet.boot(name)) is not None}
    if version is None or found is None:
        raise RuntimeError("no engine can load the committed version before its contents are known")
    known = {} if fleet.policy.verify is Verify.OFF else dict(fleet.weights.checksums)
    part = StagedUpdate(found.update, "", bytes=found.bytes, version=version, digest=found.digest, checksums=known)
    update = Update(boots, fleet.now, staged=part)
    await load_groups(fleet, update, part, is_open=False)
    if fleet.weights.staged == found:
        fleet.weights.checksums |= part.checksums
    for name in part.loaded:
        fleet.engines[name].tries, fleet.engines[name].note = 0, ""
    for name, why in update.dropped.items():
        pause = fleet.engines[name].retry_later(fleet.now)
        fleet.engines[name].note = f"it {why.rstrip('.')} ({version}). It tries again in {pause:.0f} s."
    if update.dropped:
        return Answer(500, describe_dropped(update.dropped))
    return Answer(200, f"{', '.join(part.loaded)} have loaded version {version}.")
