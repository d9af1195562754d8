"""Memory of the engines: released and resumed by a trainer, and weights that are compared after they came back. Pure.

Engines that ``spec.state`` puts to sleep do it by themselves (``agent.sleep``). This module holds what the whole fleet does about it.
"""

from __future__ import annotations

from collections.abc import Iterable

from sglang_rollout.coordinator.update.engine import Engine
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.requests import Answer, ReleaseMemory, ResumeMemory
from sglang_rollout.coordinator.update.rules import take_turn
from sglang_rollout.coordinator.update.steps import Results, failures, results_by_engine, same_body, send, sync, turn
from sglang_rollout.coordinator.update.verify import CHECKSUM, checksums_of_holders
from sglang_rollout.sglang.api import MEMORY_TAGS, ControlCall, MemoryTag
from sglang_rollout.wire.agent import AckRequest
from sglang_rollout.wire.ports import AGENT_ACK
from sglang_rollout.wire.reasons import RefusedError
from sglang_rollout.wire.record import EngineChecksums
from sglang_rollout.wire.states import FleetMode, FleetState, describe_state


async def release(fleet: Fleet, ask: ReleaseMemory, at: str | None = None) -> Answer:
    """Let every engine, or only ``at``, at whose own URL this was asked, release these kinds of memory.

    If an engine refuses, the others keep their memory released: their weights are lost in any case. Calling again continues with the rest.
    """
    await take_turn(fleet, ask, at)
    if fleet.applied_state is FleetState.ASLEEP:
        return Answer(200, f"Memory is released already. {describe_state(fleet.applied_state)}")
    names = _called_engines(fleet, at)
    if not names:
        raise RefusedError(_no_engine_message(fleet, at, "release"), status=503)
    tags = ask.tags or MEMORY_TAGS
    results = await send(ControlCall.RELEASE_MEMORY.path, same_body(names, {"tags": list(tags)}), fleet.policy.deadlines.pause_seconds)
    for name in names:
        if results[name].ok:
            note_released(fleet.engines[name], [*_released(fleet.engines[name]), *tags])
    return _report(results, "release its memory", "Memory released on all engines.")


async def resume(fleet: Fleet, ask: ResumeMemory, at: str | None = None) -> Answer:
    """Let every engine, or only ``at``, resume what it has released of these kinds. SGLang ends if asked to resume anything else."""
    await turn()
    if fleet.applied_state is FleetState.ASLEEP:
        raise RefusedError(f"Memory stays released. {describe_state(fleet.applied_state)}", status=409)
    bodies = {}
    names = _called_engines(fleet, at)
    if at is not None and not names:
        raise RefusedError(_no_engine_message(fleet, at, "take back"), status=503)
    for name in names:
        tags = [tag for tag in _released(fleet.engines[name]) if not ask.tags or tag in ask.tags]
        if tags:
            bodies[name] = {"tags": tags}
    if not bodies:
        return Answer(200, "No engine has released such memory: there was nothing to do.")
    results = await send(ControlCall.RESUME_MEMORY.path, bodies, fleet.policy.deadlines.pause_seconds)
    for name, body in bodies.items():
        if results[name].ok:
            note_released(fleet.engines[name], [tag for tag in _released(fleet.engines[name]) if tag not in body["tags"]])
    return _report(results, "take its memory back", "Memory is back on all engines that had released it.")


def _called_engines(fleet: Fleet, at: str | None) -> list[str]:
    return [name for name in fleet.up() if at is None or name == at]


def _no_engine_message(fleet: Fleet, at: str | None, what: str) -> str:
    if at is None:
        return f"No engine of this fleet is up, so there is no memory to {what}. Try again."
    return f"Engine {at} has no memory to {what} now: {fleet.engines[at].why_absent().rstrip('.')}. Try again."


def _released(engine: Engine) -> list[str]:
    return engine.status.released if engine.status is not None else []


def note_released(engine: Engine, released: Iterable[str]) -> None:
    """Note which memory is released before the agent confirms it."""
    seen, left = engine.status, list(dict.fromkeys(released))
    if seen is not None:
        is_woken = MemoryTag.WEIGHTS not in left and (seen.woken or MemoryTag.WEIGHTS in seen.released)
        engine.status = seen.model_copy(update={"released": left, "woken": is_woken})
    if MemoryTag.WEIGHTS in left:
        engine.compared = None


def _report(results: Results, what: str, done: str) -> Answer:
    failed = failures(results)
    if not failed:
        return Answer(200, done, {"engines": results_by_engine(results)})
    name, result = next(iter(failed.items()))
    others = ", ".join(name for name, result in results.items() if result.ok) or "none"
    message = f"engine {name} did not {what}: {result.message.rstrip('.')}. Done on: {others}. Call again to continue with the rest."
    return Answer(409 if result.status == 409 else 502, message, {"engine": name, "engines": results_by_engine(results)})


async def note_checksums(fleet: Fleet) -> None:
    """Ask engines that hold the committed version for its checksums, while there are such engines."""
    boots = {name: fleet.boot(name) or "" for name in engines_without_checksums(fleet)}
    if fleet.committed is None:
        return
    results = await checksums_of_holders(fleet, boots, fleet.committed)
    for name, boot in boots.items():
        found = results[name].checksums
        if found is None:
            continue
        fleet.weights.checksums[fleet.engines[name].tensor_size] = found
        if fleet.keeps_weights:
            fleet.weights.engine_checksums[name] = EngineChecksums(boot_id=boot, checksums=found)


def engines_without_checksums(fleet: Fleet) -> list[str]:
    """Return the engines to be asked before a sleep.

    One engine of each shape, because a trainer gave all of them the same. Without a trainer every engine in each of its boots: another
    image or another file of the model makes other bytes of the same version.
    """
    if fleet.mode is FleetMode.HYBRID:
        return []  # the trainer sends weights after every sleep
    committed = fleet.committed
    holding = [name for name in fleet.up() if committed is not None and fleet.engines[name].holds(committed)]
    asked = [name for name in holding if not fleet.engines[name].released]
    if fleet.keeps_weights:
        return [name for name in asked if _own_checksums(fleet, name) is None]
    peers = {fleet.engines[name].tensor_size: name for name in reversed(asked)}
    return [name for size, name in peers.items() if size not in fleet.weights.checksums]


def _own_checksums(fleet: Fleet, name: str) -> tuple[str, ...] | None:
    noted = fleet.weights.engine_checksums.get(name)
    return noted.checksums if noted is not None and noted.boot_id == fleet.boot(name) else None


def find_woken(fleet: Fleet) -> list[str]:
    """Return the engines whose weights are back in memory and have not been compared since."""
    found = []
    for name, engine in fleet.engines.items():
        status = engine.status
        if status is None or MemoryTag.WEIGHTS in status.released:
            engine.compared = None
        elif fleet.mode is FleetMode.HYBRID and status.released:
            continue  # the trainer sends weights before it resumes the rest of the memory
        elif engine.member and engine.is_comparing:
            found.append(name)
    return found if fleet.update is None and fleet.applied_state is not FleetState.ASLEEP else []


async def compare_woken(fleet: Fleet, names: list[str]) -> Answer:
    """Compare engines that woke with the checksums of the committed version. Engines that hold it may serve again.

    Other engines hold whatever was left in their memory: they catch up, or wait for the next push.
    """
    committed = fleet.committed
    if committed is None:
        raise RuntimeError("no engine can be compared before the committed version is proved")
    boots = {name: fleet.boot(name) for name in names}
    await note_checksums(fleet)
    right = {name: _own_checksums(fleet, name) or fleet.weights.checksums.get(fleet.engines[name].tensor_size) for name in names}
    known = [name for name in names if right[name] is not None]
    results = await send(ControlCall.CHECK_WEIGHTS.path, same_body(known, CHECKSUM), fleet.policy.deadlines.update_seconds)
    same_bytes = [name for name in known if results[name].checksums == right[name]]
    acks = {
        name: AckRequest(version=committed, boot_id=fleet.engines[name].boot or "", cohort=[name], verified=True).model_dump(mode="json")
        for name in same_bytes
    }
    await send(AGENT_ACK, acks, fleet.policy.deadlines.pause_seconds, idempotent=True)
    await sync(fleet)
    for name, boot in boots.items():
        fleet.engines[name].compared = boot
    return Answer(200, f"{len(same_bytes)} of {len(names)} engines that woke hold version {committed}.")
