"""How an engine that does not hold the committed version gets it without the trainer. Pure.

*Where from* (:func:`source`), *who and when* (:func:`next_joiner`) and *how* (:func:`catch_up`) are kept apart. An engine
that catches up is no member meanwhile: the trainer's pushes go on without it. It runs beside other operations and takes the
turn only for its last step, so that its gate opens in a fleet that is at rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_rollout.api.weights_spec import Verify
from sglang_rollout.coordinator.update.engine import Engine
from sglang_rollout.coordinator.update.events import Result
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.requests import Answer, Body
from sglang_rollout.coordinator.update.steps import same, send, soil, sync, turn
from sglang_rollout.coordinator.update.verify import CHECKSUM, Checksums, vouched
from sglang_rollout.coordinator.update.versions import key
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.agent import AckRequest, CheckpointRequest
from sglang_rollout.wire.ports import AGENT_ACK, AGENT_CHECKPOINT
from sglang_rollout.wire.states import FleetState
from sglang_rollout.wire.weights import EngineState, Version

PLACE = "{version}"
"""In ``weights.catchUp.disk``: stands for the version's label."""
FIRST_PAUSE = 10.0
LONGEST_PAUSE = 600.0
"""An engine that could not catch up tries again after 10 s, 20 s, … 10 min: the snapshot may yet be written."""
MARGIN = 5.0


@dataclass(frozen=True)
class Source:
    """Where a version can be loaded from."""

    request: CheckpointRequest
    digest: str | None = None
    """What the checkpoint must say of itself; None: not known."""


class _FailedError(Exception):
    """The engine could not catch up; the message says why, without naming it."""


def source(fleet: Fleet) -> Source | None:
    """Where the committed version can be had; None: only from the trainer."""
    version, limit = fleet.committed, fleet.policy.deadlines.update_seconds
    if version is None or version.is_base:
        return None
    if fleet.weights.disk is not None and fleet.weights.disk.version == version:
        return Source(CheckpointRequest(path=fleet.weights.disk.path, deadline=limit), fleet.weights.disk.digest)
    place = fleet.policy.catch_up.disk
    if place is None:
        return None
    if PLACE in place:
        return Source(CheckpointRequest(path=place.replace(PLACE, version.label), deadline=limit))
    return Source(CheckpointRequest(path=place, snapshot=version, fleet_id=fleet.weights.fleet_id, deadline=limit))


def next_joiner(fleet: Fleet) -> str | None:
    """The engine that begins to catch up now: the longest waiting first, so many at a time as the policy allows."""
    if fleet.update is not None or fleet.pause is not None or fleet.applied_state is FleetState.ASLEEP or source(fleet) is None:
        return None
    if sum(engine.catching for engine in fleet.engines.values()) >= fleet.policy.catch_up.parallel:
        return None
    waiting = [name for name in fleet.engines if _wants(fleet, name)]
    return min(waiting, key=lambda name: fleet.engines[name].again_at, default=None)


def _wants(fleet: Fleet, name: str) -> bool:
    engine = fleet.engines[name]
    if not engine.member or engine.status is None or engine.released or fleet.now < engine.again_at:
        return False
    if engine.status.session or (engine.status.paused and fleet.applied_state is FleetState.ACTIVE):
        return False  # somebody must end that first
    held = engine.status.version if engine.status.state is EngineState.CLEAN else None
    served = [fleet.committed, *fleet.tolerated()]
    return held is None or key(held) not in {key(version) for version in served if version is not None}


async def catch_up(fleet: Fleet, name: str, found: Source) -> Answer:
    """Bring one engine to the version that is committed now. The engine is marked ``catching`` by whoever starts this."""
    engine, version = fleet.engines[name], fleet.committed
    if version is None:
        raise RuntimeError("nobody can catch up before the committed version is proved")
    engine.note = f"it loads version {version.label} from {found.request.path}."
    try:
        await _load(fleet, engine, found, version)
        await turn()
        await _open(fleet, engine, version)
    except _FailedError as error:
        pause = min(FIRST_PAUSE * 2**engine.tries, LONGEST_PAUSE)
        engine.tries += 1
        engine.again_at = fleet.now + pause
        engine.note = (
            f"it could not load version {version.label}: {error}. It tries again in {pause:.0f} s;"
            " a complete push of the trainer helps, too."
        )
        return Answer(500, f"engine {name}: {engine.note}")
    finally:
        engine.catching = False
    engine.tries, engine.note, engine.wrote = 0, "", frozenset()
    return Answer(200, f"engine {name} has caught up with version {version}")


async def _load(fleet: Fleet, engine: Engine, found: Source, version: Version) -> None:
    name, limit = engine.wanted.name, fleet.policy.deadlines.update_seconds
    boot = engine.boot
    request = found.request.model_copy(update={"names": True})
    reply = await _one(name, AGENT_CHECKPOINT, request.model_dump(mode="json"), limit + MARGIN)
    if not reply.ok:
        raise _FailedError(reply.message.rstrip("."))
    if found.digest is not None and reply.digest != found.digest:
        raise _FailedError(f"{found.request.path} does not hold any more what the fleet loaded from it")
    if fleet.engines.get(name) is not engine or engine.boot != boot:
        raise _FailedError("the engine was restarted meanwhile")
    body = {"model_path": reply.path or found.request.path, "flush_cache": False, "abort_all_requests": False, "is_async": False}
    # The folder may hold something else than it should: until the engine vouches for the version, it needs these from whoever comes next.
    engine.wrote |= reply.names or frozenset()
    loaded = (await soil(fleet, ControlCall.UPDATE_DISK.path, same([name], body), limit))[name]
    if not loaded.ok:
        raise _FailedError(f"the engine did not load {reply.path or found.request.path}: {loaded.message.rstrip('.')}")
    await _compare(fleet, engine, version)
    await _one(name, ControlCall.FLUSH_CACHE.path, {}, fleet.policy.deadlines.pause_seconds)


async def _compare(fleet: Fleet, joiner: Engine, version: Version) -> None:
    """With an engine of its shape that holds the version, if there is one: a folder may hold something else than its name says."""
    name, size = joiner.wanted.name, joiner.tensor_size
    peer = next((other for other, engine in fleet.engines.items() if engine.tensor_size == size and engine.holds(version)), None)
    right = fleet.weights.checksums.get(size)
    if right is None and peer is not None and fleet.policy.verify is not Verify.OFF:
        await turn()  # one asks for all: an engine takes one control call at a time
        right = fleet.weights.checksums.get(size) or await _ask_peer(fleet, peer, size, version)
    if right is None:
        return
    mine = await _one(name, ControlCall.CHECK_WEIGHTS.path, CHECKSUM, fleet.policy.deadlines.update_seconds)
    if mine.checksums != right:
        raise _FailedError("it then held other weights than the engines that got them from the trainer")


async def _ask_peer(fleet: Fleet, peer: str, size: int, version: Version) -> Checksums:
    """What an engine holds that has the version."""
    said = (await vouched(fleet, [peer], version))[peer]
    if said.checksums is None:
        raise _FailedError(f"engine {peer}, with which it was to be compared, did not say what it holds: {said.message.rstrip('.')}")
    if fleet.committed == version:
        fleet.weights.checksums[size] = said.checksums
    return said.checksums


async def _open(fleet: Fleet, engine: Engine, version: Version) -> None:
    """The engine vouches for the version and, if that is still served, its gate opens. In a paused fleet it pauses, too."""
    name = engine.wanted.name
    if fleet.engines.get(name) is not engine or engine.boot is None:
        raise _FailedError("the engine is gone")
    if fleet.pause is not None or fleet.applied_state is FleetState.PAUSED:
        mode = fleet.pause.mode if fleet.pause is not None else fleet.policy.pause_mode.sglang.value
        paused = await _one(name, ControlCall.PAUSE.path, {"mode": mode} if mode else {}, fleet.policy.deadlines.pause_seconds)
        if not paused.ok:
            raise _FailedError(f"it could not be paused like the rest of the fleet: {paused.message.rstrip('.')}")
    if fleet.pause is not None:
        fleet.pause.engines = (*fleet.pause.engines, name)
    body = AckRequest(version=version, boot_id=engine.boot, cohort=[name]).model_dump(mode="json")
    reply = await _one(name, AGENT_ACK, body, fleet.policy.deadlines.pause_seconds)
    if not reply.ok:
        raise _FailedError(reply.message.rstrip("."))
    await sync(fleet, [name])


async def _one(name: str, path: str, body: Body, deadline: float) -> Result:
    results = await send(path, same([name], body), deadline, idempotent=path == AGENT_CHECKPOINT)
    return results[name]
