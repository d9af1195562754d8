"""How an engine that does not hold the committed version loads it without the trainer. Pure.

*Where from* (:func:`find_checkpoint`), *who and when* (:func:`next_engine`) and *how* (:func:`catch_up`) are separate. An engine that
catches up is no member meanwhile: pushes of the trainer continue without it. Catching up runs beside other operations and takes the turn
only for its last step, so that the gate opens in a fleet that is at rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sglang_rollout.api.weights_spec import Verify
from sglang_rollout.coordinator.update.engine import Engine
from sglang_rollout.coordinator.update.events import Result
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.requests import Answer, Body
from sglang_rollout.coordinator.update.steps import CHECKPOINT_MARGIN_SECONDS, same_body, send, send_and_mark_dirty, sync, turn
from sglang_rollout.coordinator.update.verify import checksums_of_holders
from sglang_rollout.coordinator.update.versions import order_key
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.sglang.checksums import CHECKSUM, Checksums
from sglang_rollout.wire.agent import AckRequest, CheckpointRequest
from sglang_rollout.wire.ports import AGENT_ACK, AGENT_CHECKPOINT
from sglang_rollout.wire.states import EngineState, FleetState, Version

VERSION_PLACEHOLDER = "{version}"
"""In ``weights.catchUp.disk``: stands for the version's label."""
FIRST_RETRY_SECONDS = 10.0
LONGEST_RETRY_SECONDS = 600.0
"""An engine that could not catch up tries again after 10 s, 20 s, … 10 min: the snapshot may be written by then."""


@dataclass(frozen=True)
class Checkpoint:
    """Where a version can be loaded from."""

    request: CheckpointRequest
    digest: str | None = None
    """The digest that the checkpoint must have; None: not known."""


class _FailedError(Exception):
    """The engine could not catch up. The message says why, without the name of the engine."""


def find_checkpoint(fleet: Fleet) -> Checkpoint | None:
    """Return where the committed version can be loaded from; None: only the trainer has it."""
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
    if fleet.update is not None or fleet.pause is not None or fleet.applied_state is FleetState.ASLEEP or find_checkpoint(fleet) is None:
        return None
    if sum(engine.is_catching_up for engine in fleet.engines.values()) >= fleet.policy.catch_up.parallel:
        return None
    waiting = [name for name in fleet.engines if _needs_catch_up(fleet, name)]
    return min(waiting, key=lambda name: fleet.engines[name].retry_at, default=None)


def _needs_catch_up(fleet: Fleet, name: str) -> bool:
    engine = fleet.engines[name]
    if not engine.member or engine.status is None or engine.released or fleet.now < engine.retry_at:
        return False
    if engine.status.session or (engine.status.paused and fleet.applied_state is FleetState.ACTIVE):
        return False  # its session or pause must end first
    held = engine.status.version if engine.status.state is EngineState.CLEAN else None
    served = [fleet.committed, *fleet.tolerated()]
    return held is None or order_key(held) not in {order_key(version) for version in served if version is not None}


async def catch_up(fleet: Fleet, name: str, found: Checkpoint) -> Answer:
    """Load the committed version on one engine. The caller has marked the engine ``is_catching_up``."""
    engine, version = fleet.engines[name], fleet.committed
    if version is None:
        raise RuntimeError("no engine can catch up before the committed version is proved")
    engine.note = f"it loads version {version.label} from {found.request.path}."
    names: Iterable[str] = ()
    try:
        if engine.signed_only and fleet.weights.signed is None:
            raise _FailedError("that version is not signed, and this fleet accepts signed versions only")
        folder = await _check_folder(fleet, engine, found)
        names = folder.names or ()
        await _load(fleet, engine, folder.path or found.request.path, version)
        await turn()
        await _open_gate(fleet, engine, version)
    except _FailedError as error:
        # The folder may hold something else than it should. The next update of this engine must bring these tensors.
        fleet.weights.announced.add(names)
        pause = min(FIRST_RETRY_SECONDS * 2**engine.tries, LONGEST_RETRY_SECONDS)
        engine.tries += 1
        engine.retry_at = fleet.now + pause
        engine.note = (
            f"it could not load version {version.label}: {error}. It tries again in {pause:.0f} s;"
            " a complete push of the trainer also helps."
        )
        return Answer(500, f"engine {name}: {engine.note}")
    finally:
        engine.is_catching_up = False
    engine.tries, engine.note = 0, ""
    return Answer(200, f"engine {name} has caught up with version {version}")


async def _check_folder(fleet: Fleet, engine: Engine, found: Checkpoint) -> Result:
    name, limit, boot = engine.wanted.name, fleet.policy.deadlines.update_seconds, engine.boot
    request = found.request.model_copy(update={"names": True})
    reply = await _call_one(name, AGENT_CHECKPOINT, request.model_dump(mode="json"), limit + CHECKPOINT_MARGIN_SECONDS)
    if not reply.ok:
        raise _FailedError(reply.message.rstrip("."))
    if found.digest is not None and reply.digest != found.digest:
        raise _FailedError(f"{found.request.path} no longer holds what the fleet loaded from it")
    if fleet.engines.get(name) is not engine or engine.boot != boot:
        raise _FailedError("the engine was restarted meanwhile")
    return reply


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
    signed = fleet.weights.signed if fleet.committed == version else None
    body = AckRequest(version=version, boot_id=engine.boot, cohort=[name], signed=signed).model_dump(mode="json")
    reply = await _call_one(name, AGENT_ACK, body, fleet.policy.deadlines.update_seconds)
    if not reply.ok:
        raise _FailedError(reply.message.rstrip("."))
    await sync(fleet, [name])


async def _call_one(name: str, path: str, body: Body, deadline: float) -> Result:
    results = await send(path, same_body([name], body), deadline, idempotent=path == AGENT_CHECKPOINT)
    return results[name]
