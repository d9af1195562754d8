"""Memory of the engines: released and resumed by a trainer, and weights that are compared after they came back. Pure.

On a fleet with its trainer's GPUs (``spec.mode: Colocated`` and ``Hybrid``) the last release or resume call, at the fleet's URL or at an
engine's, says what the trainer has. The record keeps it, because engines and coordinators that start later do not know that call.

Engines that ``spec.state`` puts to sleep release their memory by themselves (``agent.watchdog``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sglang_rollout.coordinator.update.membership import describe_none_up
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.requests import Answer, ReleaseMemory, ResumeMemory
from sglang_rollout.coordinator.update.steps import Results, failures, results_by_engine, same_body, send, sync, write
from sglang_rollout.coordinator.update.verify import checksums_of_holders
from sglang_rollout.sglang.api import MEMORY_TAGS, ControlCall, MemoryTag
from sglang_rollout.sglang.checksums import CHECKSUM
from sglang_rollout.wire.agent import AckRequest
from sglang_rollout.wire.ports import AGENT_ACK
from sglang_rollout.wire.reasons import RefusedError
from sglang_rollout.wire.record import EngineChecksums
from sglang_rollout.wire.states import FleetMode, FleetState, describe_state

RELEASE_RETRY_SECONDS = 10.0
"""When an engine that did not release its memory is asked again."""


async def release(fleet: Fleet, ask: ReleaseMemory, at: str | None = None) -> Answer:
    """Let every engine, or only ``at``, at whose own URL this was asked, release these kinds of memory.

    If an engine refuses, the others keep their memory released: their weights are lost in any case. Calling again continues with the rest.
    """
    if fleet.applied_state is FleetState.ASLEEP:
        return Answer(200, f"Memory is released already. {describe_state(fleet.applied_state)}")
    names = _called_engines(fleet, at)
    if not names:
        raise RefusedError(_no_engine_message(fleet, at, "release"), status=503)
    tags = ask.tags or MEMORY_TAGS
    results = await send(ControlCall.RELEASE_MEMORY.path, same_body(names, {"tags": list(tags)}), fleet.policy.deadlines.pause_seconds)
    for name in names:
        if results[name].ok:
            _note_released(fleet, name, [*fleet.engines[name].released, *tags])
            fleet.hold()
    return _report(results, "release its memory", "Memory released on all engines.")


async def resume(fleet: Fleet, ask: ResumeMemory, at: str | None = None) -> Answer:
    """Let every engine, or only ``at``, resume what it has released of these kinds. SGLang ends if asked to resume anything else."""
    if fleet.applied_state is FleetState.ASLEEP:
        raise RefusedError(f"Memory stays released. {describe_state(fleet.applied_state)}", status=409)
    bodies = {}
    names = _called_engines(fleet, at)
    if at is not None and not names:
        raise RefusedError(_no_engine_message(fleet, at, "take back"), status=503)
    for name in names:
        tags = [tag for tag in fleet.engines[name].released if not ask.tags or tag in ask.tags]
        if tags:
            bodies[name] = {"tags": tags}
    if not bodies:
        return Answer(200, "No engine has released such memory: there was nothing to do.")
    results = await send(ControlCall.RESUME_MEMORY.path, bodies, fleet.policy.deadlines.pause_seconds)
    for name, body in bodies.items():
        if results[name].ok:
            _note_released(fleet, name, [tag for tag in fleet.engines[name].released if tag not in body["tags"]])
    return _report(results, "take its memory back", "Memory is back on all engines that had released it.")


def _called_engines(fleet: Fleet, at: str | None) -> list[str]:
    return [name for name in fleet.up() if at is None or name == at]


def _no_engine_message(fleet: Fleet, at: str | None, what: str) -> str:
    if at is None:
        return describe_none_up(fleet, f"there is no memory to {what}")
    return f"Engine {at} has no memory to {what} now: {fleet.engines[at].why_absent().rstrip('.')}. Try again."


def _note_released(fleet: Fleet, name: str, released: Iterable[str]) -> None:
    """Note which memory is released before the agent confirms it."""
    engine, left = fleet.engines[name], list(dict.fromkeys(released))
    if engine.status is not None:
        is_woken = MemoryTag.WEIGHTS not in left and (engine.status.woken or MemoryTag.WEIGHTS in engine.status.released)
        engine.anticipate(fleet.next_seq(), released=left, woken=is_woken)
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


# --- memory that a trainer on the same GPUs has --------------------------------------------------------------------


async def release_for_trainer(fleet: Fleet, ask: ReleaseMemory, at: str | None = None) -> Answer:
    """Release memory. Checksums are asked first: afterwards only a comparison tells whether the weights came back."""
    await note_checksums(fleet)
    silent = engines_without_checksums(fleet)
    if silent:
        raise RefusedError(
            f"engine {silent[0]} did not return the checksum of its weights, so that they could not be compared after the sleep."
            " Nothing was released. Call again.",
            status=502,
        )
    more = ask.tags or MEMORY_TAGS
    await _note_trainer_memory(fleet, at, lambda tags: {*tags, *more})
    return await release(fleet, ask, at)


async def note_resumed(fleet: Fleet, ask: ResumeMemory, at: str | None) -> None:
    """Note that the trainer gives memory back, unless the spec has released it."""
    if fleet.applied_state is not FleetState.ASLEEP:
        await _note_trainer_memory(fleet, at, lambda tags: {tag for tag in tags if ask.tags and tag not in ask.tags})


async def resume_for_trainer(fleet: Fleet, ask: ResumeMemory, at: str | None = None) -> Answer:
    """Resume memory. Answers only when the engines that have all of their memory serve."""
    await note_resumed(fleet, ask, at)
    without = [name for name in fleet.up() if MemoryTag.WEIGHTS in fleet.engines[name].released]
    answer = await resume(fleet, ask, at)
    back = [name for name in without if MemoryTag.WEIGHTS not in fleet.engines[name].released]
    if not back:
        await sync(fleet)
        return answer
    await compare_woken(fleet, back)
    committed = fleet.committed
    wrong = [name for name in back if committed is None or not fleet.engines[name].holds(committed)]
    if answer.success and wrong:
        message = f"engine {wrong[0]} has its memory back, but not the weights that it was started with: restart it. Its gate stays closed."
        return Answer(502, message, {"engine": wrong[0], "unproved": wrong})
    return answer


def engines_to_release(fleet: Fleet) -> list[str]:
    """Return the engines that hold memory which the trainer has: they started since, or refused before."""
    if fleet.mode is None or fleet.applied_state is FleetState.ASLEEP:
        return []
    in_update = fleet.update.boots if fleet.update is not None else {}
    found = [
        name for name, engine in fleet.members().items() if _tags_to_release(fleet, name) and fleet.has_news(name) and name not in in_update
    ]
    return [name for name in found if fleet.now >= fleet.engines[name].release_at]


async def release_trainer_memory(fleet: Fleet, names: list[str]) -> Answer:
    """Let these engines release what the trainer has."""
    for name in names:
        fleet.engines[name].release_at = fleet.now + RELEASE_RETRY_SECONDS
    await note_checksums(fleet)
    silent = engines_without_checksums(fleet)
    bodies = {name: {"tags": _tags_to_release(fleet, name)} for name in names if name not in silent}
    results = await send(ControlCall.RELEASE_MEMORY.path, bodies, fleet.policy.deadlines.pause_seconds)
    failed = failures(results)
    for name in bodies.keys() - failed.keys():
        _note_released(fleet, name, [*fleet.engines[name].released, *bodies[name]["tags"]])
        fleet.engines[name].release_at = 0.0
    return Answer(200, f"{len(bodies) - len(failed)} of {len(names)} engines released the memory that the trainer has.")


def _tags_to_release(fleet: Fleet, name: str) -> list[str]:
    return [tag for tag in fleet.interruptions.trainer_memory(name) if tag not in fleet.engines[name].released]


async def _note_trainer_memory(fleet: Fleet, at: str | None, change: Callable[[Iterable[str]], set[str]]) -> None:
    """Change what the trainer has of one engine's memory, or of all engines', and write the record before any engine receives the call.

    Otherwise a coordinator that starts a moment later would undo the call. While the store is away the record is written later.
    """
    interruptions = fleet.interruptions
    if at is not None:
        interruptions.at_engines[at] = frozenset(change(interruptions.trainer_memory(at)))
    else:
        interruptions.release_to_trainer(change(interruptions.released_to_trainer))
        one_by_one = [name for name in interruptions.at_engines if name in fleet.engines]
        interruptions.at_engines = {name: frozenset(change(interruptions.trainer_memory(name))) for name in one_by_one}
    record = fleet.record()
    if record is not None:
        await write(record)


# --- weights after a sleep ------------------------------------------------------------------------------------------


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
    return found if fleet.is_at_rest and fleet.applied_state is not FleetState.ASLEEP else []


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
