"""How an engine that does not hold the committed version loads it without the trainer: from disk, or from a staged copy. Pure.

*Where from* (:func:`find_source`), *who and when* (:func:`next_engine`) and *how* (:func:`catch_up`) are separate. An engine that
catches up is no member meanwhile: pushes of the trainer continue without it. Catching up runs beside other operations and takes the turn
only for its last step, so that the gate opens in a fleet that is at rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_rollout.api.weights_spec import Verify
from sglang_rollout.coordinator.update.complete_push import note_names, read_model, request_restarts
from sglang_rollout.coordinator.update.completeness import Held, Rule
from sglang_rollout.coordinator.update.engine import FIRST_RETRY_SECONDS, Engine, retry_pause
from sglang_rollout.coordinator.update.events import Result
from sglang_rollout.coordinator.update.loading import activate
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.requests import Answer, Body
from sglang_rollout.coordinator.update.staging import MAX_PEERS, holders, kept_updates, parents_of_one, stage_body
from sglang_rollout.coordinator.update.steps import ANSWER_MARGIN_SECONDS, fence, same_body, send, send_and_mark_dirty, sync, turn
from sglang_rollout.coordinator.update.store import STORE
from sglang_rollout.coordinator.update.tensor_names import TensorNames
from sglang_rollout.coordinator.update.verify import checksums_of_holders
from sglang_rollout.coordinator.update.versions import order_key
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.sglang.checksums import CHECKSUM, Checksums
from sglang_rollout.wire.agent import AckRequest, CheckpointRequest
from sglang_rollout.wire.ports import AGENT_ACK, AGENT_CHECKPOINT, AGENT_RUN, AGENT_STAGE, STORE_FETCH
from sglang_rollout.wire.states import BASE, EngineState, FleetState, StagedVersion, Version

SNAPSHOT_SECONDS = 3600.0
"""Time for the weight store to load a snapshot. A load that is late starts again from its beginning, so a slow volume needs enough time."""
VERSION_PLACEHOLDER = "{version}"
"""In ``weights.catchUp.disk``: stands for the version's label."""


@dataclass(frozen=True)
class Checkpoint:
    """Where a version can be loaded from."""

    request: CheckpointRequest
    digest: str | None = None
    """The digest that the checkpoint must have; None: not known."""


class _FailedError(Exception):
    """The engine could not catch up. The message says why, without the name of the engine."""


def find_source(fleet: Fleet) -> Checkpoint | StagedVersion | None:
    """Return where the committed version can be loaded from; None: only the trainer has it."""
    version = fleet.weights.staged if fleet.is_staged else None
    if version is None:
        return find_checkpoint(fleet)
    # Engines that wait for a copy are in no update, so none waits before a pod has the whole version.
    stored = fleet.store is not None and fleet.store.holds(version)
    return version if stored or holders(fleet, version) else None


def find_checkpoint(fleet: Fleet) -> Checkpoint | None:
    """Return the checkpoint of the committed version; None: there is none."""
    version, limit = fleet.committed, fleet.policy.deadlines.update_seconds
    if version is None or version.is_base:
        return None
    if fleet.weights.disk is not None and fleet.weights.disk.version == version:
        request = CheckpointRequest(path=fleet.weights.disk.path, deadline=limit, allowed=list(fleet.paths))
        return Checkpoint(request, fleet.weights.disk.digest)
    place = fleet.policy.catch_up.disk
    if place is None:
        return None
    if VERSION_PLACEHOLDER in place:
        return Checkpoint(CheckpointRequest(path=place.replace(VERSION_PLACEHOLDER, version.label), deadline=limit))
    return Checkpoint(CheckpointRequest(path=place, snapshot=version, fleet_id=fleet.weights.fleet_id, deadline=limit))


def next_engine(fleet: Fleet) -> str | None:
    """Return the engine that begins to catch up now: the longest waiting first, as many at a time as the policy allows."""
    if not fleet.is_at_rest or fleet.pause is not None or fleet.applied_state is FleetState.ASLEEP or find_source(fleet) is None:
        return None
    if sum(engine.is_catching_up for engine in fleet.engines.values()) >= fleet.policy.catch_up.parallel:
        return None
    waiting = [name for name in fleet.engines if _needs_catch_up(fleet, name)]
    return min(waiting, key=lambda name: fleet.engines[name].retry_at, default=None)


def _needs_catch_up(fleet: Fleet, name: str) -> bool:
    engine = fleet.engines[name]
    if not engine.member or engine.status is None or engine.released or fleet.now < engine.retry_at:
        return False
    if not fleet.can_take_updates(engine):
        return False
    # A staged copy may be loaded by the agent itself at this time; the coordinator's call then waits for it.
    by_agent = isinstance(find_source(fleet), StagedVersion)
    if not by_agent and (engine.status.session or (engine.status.paused and fleet.applied_state is FleetState.ACTIVE)):
        return False  # its session or pause must end first
    # A checkpoint of another transport may lack tensors of a staged version that the engine has loaded, and that was given up.
    if not by_agent and fleet.is_staged and not (engine.status.version is not None and engine.status.version.is_base):
        return False
    held = engine.status.version if engine.status.state is EngineState.CLEAN else None
    served = [fleet.committed, *fleet.tolerated()]
    return held is None or order_key(held) not in {order_key(version) for version in served if version is not None}


async def catch_up(fleet: Fleet, name: str, found: Checkpoint | StagedVersion) -> Answer:
    """Load the committed version on one engine. The caller has marked the engine ``is_catching_up``."""
    engine, version = fleet.engines[name], fleet.committed
    if version is None:
        raise RuntimeError("no engine can catch up before the committed version is proved")
    engine.note = f"it loads version {version.label} from {_describe(found)}."
    try:
        if isinstance(found, StagedVersion):
            await _load_copy(fleet, engine, found, version)
            await turn()
            await _rejoin(fleet, engine, version)
        else:
            folder = await _check_folder(fleet, engine, found)
            await _note_folder(fleet, engine, folder)
            await _load(fleet, engine, folder.path or found.request.path, version)
            await turn()
            await _open_gate(fleet, engine, version)
    except _FailedError as error:
        pause = engine.retry_later(fleet.now)
        engine.note = (
            f"it could not load version {version.label}: {error}. It tries again in {pause:.0f} s;"
            " a complete push of the trainer also helps."
        )
        return Answer(500, f"engine {name}: {engine.note}")
    finally:
        engine.is_catching_up = False
    engine.tries, engine.note = 0, ""
    return Answer(200, f"engine {name} has caught up with version {version}")


def _describe(found: Checkpoint | StagedVersion) -> str:
    return "a staged copy" if isinstance(found, StagedVersion) else found.request.path


# --- from a staged copy ----------------------------------------------------------------------------------------------


async def _load_copy(fleet: Fleet, engine: Engine, found: StagedVersion, version: Version) -> None:
    """Copy the version into the engine's pod, from peers or the weight store if the pod does not have it, and load it."""
    name, boot, limits = engine.wanted.name, engine.boot, fleet.policy.deadlines
    body = stage_body(fleet, found.update, parents_of_one(fleet, found, name), digest=found.digest, version=version)
    results = await send(AGENT_STAGE, {name: body}, limits.stage_seconds + ANSWER_MARGIN_SECONDS, idempotent=True)
    if not results[name].ok:
        raise _FailedError(f"its pod has no copy: {results[name].message.rstrip('.')}")
    if fleet.engines.get(name) is not engine or boot is None or engine.boot != boot:
        raise _FailedError("the engine was restarted meanwhile")
    if fleet.weights.staged != found:
        raise _FailedError("another version was committed meanwhile")
    ack = AckRequest(version=version, boot_id=boot, cohort=[name])
    right = fleet.weights.checksums.get(engine.tensor_size)
    verifies = fleet.policy.verify is not Verify.OFF
    expected = {name: right if verifies else None}
    result = (await activate(fleet, found, {name: ack}, expected, checksums=verifies))[name]
    if not result.ok:
        raise _FailedError(f"the engine did not load its copy: {result.message.rstrip('.')}")
    if verifies and right is not None and result.checksums != right:
        await send_and_mark_dirty(fleet, ControlCall.BEGIN_UPDATE.path, same_body([name]), limits.pause_seconds)
        await fence(fleet, [name], "the engine holds other weights than its copy")
        raise _FailedError("it then held other weights than the engines that loaded the same version")


async def _rejoin(fleet: Fleet, engine: Engine, version: Version) -> None:
    """Resume an engine that has loaded its copy, and acknowledged it. In a paused fleet it stays paused."""
    name = engine.wanted.name
    if fleet.engines.get(name) is not engine or not engine.holds(version):
        raise _FailedError("the engine is gone, or was restarted meanwhile")
    if fleet.pause is not None:
        fleet.pause.engines = tuple(dict.fromkeys([*fleet.pause.engines, name]))
    if fleet.pause is not None or fleet.applied_state is not FleetState.ACTIVE:
        await sync(fleet, [name])
        return
    body = fleet.sync_request().model_dump(mode="json")
    resumed = await _call_one(name, AGENT_RUN, body, fleet.policy.deadlines.pause_seconds)
    if not resumed.ok:
        await fence(fleet, [name], "the engine did not resume after it had loaded its copy")
        raise _FailedError(f"it could not be resumed: {resumed.message.rstrip('.')}")


def find_without_copy(fleet: Fleet) -> str | None:
    """Return an engine whose pod begins to copy the committed version now; None if there is none.

    The agent copies while its engine boots, is paused or serves an older version. As many pods copy at a time as engines may catch up;
    pods that do not answer are not counted, because their calls may hang.
    """
    found, parallel = find_source(fleet), fleet.policy.catch_up.parallel
    if not isinstance(found, StagedVersion) or found.update not in kept_updates(fleet):
        return None
    if sum(engine.reachable and (engine.is_copying or engine.is_catching_up) for engine in fleet.engines.values()) >= parallel:
        return None
    having = set(holders(fleet, found))
    waiting = [name for name, engine in fleet.engines.items() if name not in having and _may_copy(fleet, engine)]
    return min(waiting, key=lambda name: fleet.engines[name].retry_at, default=None)


def _may_copy(fleet: Fleet, engine: Engine) -> bool:
    if engine.status is None or not engine.reachable or engine.status.draining or fleet.now < engine.retry_at:
        return False
    if not engine.takes_copies:
        return False
    return not engine.is_copying and not engine.is_catching_up


async def copy_committed(fleet: Fleet, name: str) -> Answer:
    """Copy the committed version into the pod of an engine. The caller has marked the engine ``is_copying``.

    A lost connection ends the call, because a later attempt keeps other updates.
    """
    engine, found, deadline = fleet.engines[name], fleet.weights.staged, fleet.policy.deadlines.stage_seconds
    if found is None:
        raise RuntimeError("there is no version to copy")
    try:
        body = stage_body(fleet, found.update, parents_of_one(fleet, found, name), digest=found.digest, version=fleet.committed)
        result = (await send(AGENT_STAGE, {name: body}, deadline + ANSWER_MARGIN_SECONDS))[name]
    finally:
        engine.is_copying = False
    if result.ok:
        return Answer(200, f"The pod of engine {name} has a copy of the committed version.")
    if not engine.is_catching_up:  # the engine has answered since, and its own call has ended this one
        # Failed copies do not add up: an engine that answers later begins to catch up soon.
        engine.retry_at = max(engine.retry_at, fleet.now + FIRST_RETRY_SECONDS)
    return Answer(500, f"engine {name}: its pod has no copy: {result.message}")


# --- into the weight store -------------------------------------------------------------------------------------------


def find_for_store(fleet: Fleet) -> StagedVersion | None:
    """Return the committed version if the weight store lacks it, and agents or a snapshot have it; None if there is nothing to copy now."""
    store, version = fleet.store, fleet.weights.staged
    if not fleet.is_staged or store is None or version is None or not store.is_up or store.is_fetching or fleet.now < store.retry_at:
        return None
    if version.update not in kept_updates(fleet):
        return None  # the open update needs the room
    return version if not store.holds(version) and (holders(fleet, version) or store.has_snapshot(version)) else None


async def fill_store(fleet: Fleet, version: StagedVersion) -> Answer:
    """Copy the committed version into a weight store that lost it. The caller has marked the store ``is_fetching``.

    Agents come first, because they hold it in memory. Every second attempt uses the snapshot, if there is one, and follows at once: the
    pods of engines and store may end together, and an agent that ends still reports its copy.
    """
    store = fleet.store
    if store is None:
        raise RuntimeError("there is no weight store to copy into")
    parents = [] if store.tries % 2 and store.has_snapshot(version) else holders(fleet, version)[:MAX_PEERS]
    deadline = fleet.policy.deadlines.stage_seconds if parents else SNAPSHOT_SECONDS
    instance = store.fetching
    try:
        body = stage_body(fleet, version.update, parents, digest=version.digest, version=fleet.committed, deadline=deadline)
        result = (await send(STORE_FETCH, {STORE: body}, deadline + ANSWER_MARGIN_SECONDS))[STORE]
    finally:
        if store.fetching == instance:
            store.fetching = None
    if store.instance != instance:
        return Answer(500, "The weight store was replaced while it copied the committed version.")
    if result.ok:
        store.tries, store.note = 0, ""
        return Answer(200, "The weight store holds the committed version again.")
    has_other = bool(parents) and store.has_snapshot(version)
    pause = 0.0 if has_other else retry_pause(store.tries)
    store.tries, store.retry_at = store.tries + 1, fleet.now + pause
    source = "copy the committed version from the agents" if parents else "load the committed version from its snapshot"
    following = "It loads the snapshot now" if has_other else f"It tries again in {pause:.0f} s"
    store.note = f"The weight store could not {source}: {result.message.rstrip('.')}. {following}."
    return Answer(500, store.note)


# --- from disk -------------------------------------------------------------------------------------------------------


async def _check_folder(fleet: Fleet, engine: Engine, found: Checkpoint) -> Result:
    name, limit, boot = engine.wanted.name, fleet.policy.deadlines.update_seconds, engine.boot
    request = found.request.model_copy(update={"names": True})
    reply = await _call_one(name, AGENT_CHECKPOINT, request.model_dump(mode="json"), limit + ANSWER_MARGIN_SECONDS)
    if not reply.ok:
        raise _FailedError(reply.message.rstrip("."))
    if found.digest is not None and reply.digest != found.digest:
        raise _FailedError(f"{found.request.path} no longer holds what the fleet loaded from it")
    if fleet.engines.get(name) is not engine or engine.boot != boot:
        raise _FailedError("the engine was restarted meanwhile")
    return reply


async def _note_folder(fleet: Fleet, engine: Engine, folder: Result) -> None:
    """Note the tensors that the engine receives from a folder. Raises _FailedError if the folder lacks tensors for this engine."""
    name, boot, doubt = engine.wanted.name, engine.boot, fleet.weights.doubt
    names = folder.names or frozenset()
    held = Held(base=engine.holds(BASE), doubt=doubt.has(name, boot), blank=engine.blank)
    rule = Rule(TensorNames(names), fleet.weights.names, doubt.names, await read_model(fleet))
    lacking = rule.find_lacking(held)
    if lacking is not None and not folder.compared:
        request_restarts(fleet, [] if lacking.is_committed else [name])
        raise _FailedError(f"the folder lacks {lacking}")
    if boot is not None:
        doubt.begin(name, boot)
    if not await note_names(fleet, names):
        raise _FailedError("the names of its tensors cannot be recorded, because the API server does not answer")


async def _load(fleet: Fleet, engine: Engine, path: str, version: Version) -> None:
    name, limit = engine.wanted.name, fleet.policy.deadlines.update_seconds
    body = {"model_path": path, "flush_cache": False, "abort_all_requests": False, "is_async": False}
    loaded = (await send_and_mark_dirty(fleet, ControlCall.UPDATE_DISK.path, same_body([name], body), limit))[name]
    if not loaded.ok:
        raise _FailedError(f"the engine did not load {path}: {loaded.message.rstrip('.')}")
    await _compare(fleet, engine, version)
    await _call_one(name, ControlCall.FLUSH_CACHE.path, {}, fleet.policy.deadlines.pause_seconds)


async def _compare(fleet: Fleet, joiner: Engine, version: Version) -> None:
    """Compare the engine with one of its shape that holds the version, if there is one.

    A folder may hold other weights than its name says.
    """
    name, size = joiner.wanted.name, joiner.tensor_size
    peer = next((other for other, engine in fleet.engines.items() if engine.tensor_size == size and engine.holds(version)), None)
    right = fleet.weights.checksums.get(size)
    if right is None and peer is not None and fleet.policy.verify is not Verify.OFF:
        await turn()  # one engine asks for all: a peer takes one control call at a time
        right = fleet.weights.checksums.get(size) or await _ask_peer(fleet, peer, size, version)
    if right is None:
        return
    mine = await _call_one(name, ControlCall.CHECK_WEIGHTS.path, CHECKSUM, fleet.policy.deadlines.update_seconds)
    if mine.checksums != right:
        raise _FailedError("it then held other weights than the engines that received them from the trainer")


async def _ask_peer(fleet: Fleet, peer: str, size: int, version: Version) -> Checksums:
    """Return the checksums of an engine that holds the version."""
    said = (await checksums_of_holders(fleet, [peer], version))[peer]
    if said.checksums is None:
        raise _FailedError(f"engine {peer}, with which it had to be compared, did not return its checksums: {said.message.rstrip('.')}")
    if fleet.committed == version:
        fleet.weights.checksums[size] = said.checksums
    return said.checksums


async def _open_gate(fleet: Fleet, engine: Engine, version: Version) -> None:
    """Let the engine acknowledge the version. Its gate opens if the version is still served.

    In a paused fleet the engine is paused first.
    """
    name = engine.wanted.name
    if fleet.engines.get(name) is not engine or engine.boot is None:
        raise _FailedError("the engine is gone")
    if fleet.pause is not None or fleet.applied_state is FleetState.PAUSED:
        mode = fleet.pause.mode if fleet.pause is not None else fleet.policy.pause_mode.sglang
        paused = await _call_one(name, ControlCall.PAUSE.path, {"mode": mode} if mode else {}, fleet.policy.deadlines.pause_seconds)
        if not paused.ok:
            raise _FailedError(f"it could not be paused like the rest of the fleet: {paused.message.rstrip('.')}")
    if fleet.pause is not None:
        fleet.pause.engines = (*fleet.pause.engines, name)
    body = AckRequest(version=version, boot_id=engine.boot, cohort=[name]).model_dump(mode="json")
    reply = await _call_one(name, AGENT_ACK, body, fleet.policy.deadlines.update_seconds)
    if not reply.ok:
        raise _FailedError(reply.message.rstrip("."))
    await sync(fleet, [name])


async def _call_one(name: str, path: str, body: Body, deadline: float) -> Result:
    results = await send(path, same_body([name], body), deadline, idempotent=path in (AGENT_CHECKPOINT, AGENT_STAGE))
    return results[name]
