"""A fleet on its trainer's GPUs (``spec.mode: Colocated`` and ``Hybrid``): it sleeps while its trainer has the memory. Pure.

The last release or resume call of the trainer, at the fleet's URL or at an engine's, says what the trainer has. The record keeps it,
because engines and coordinators that start later do not know that call. How a hybrid fleet takes weights: :mod:`.hybrid`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sglang_rollout.coordinator.update import hybrid, memory
from sglang_rollout.coordinator.update.engine import Engine
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.requests import (
    Answer,
    AtEngine,
    Begin,
    Call,
    CloseGroup,
    End,
    Flush,
    FromDisk,
    NewRun,
    OpenGroup,
    ReleaseMemory,
    Request,
    ResumeMemory,
    SetLabel,
    Tensors,
    Update,
)
from sglang_rollout.coordinator.update.rules import take_turn
from sglang_rollout.coordinator.update.steps import Operation, failures, send, sync, turn, write
from sglang_rollout.coordinator.update.transaction import flush
from sglang_rollout.sglang.api import MEMORY_TAGS, ControlCall, MemoryTag
from sglang_rollout.wire.reasons import RefusedError
from sglang_rollout.wire.states import KEEPS_WEIGHTS, FleetMode, FleetState

RETRY_SECONDS = 10.0
"""When an engine that did not release its memory is asked again."""
NOT_AT_ENGINES = "this call is for the fleet's URL, which is one for all engines."
OWN_GPUS = "An engine of this fleet takes no calls of its own (spec.mode: Standalone): call the fleet's URL, which is one for all engines."


def operation(fleet: Fleet, request: Request) -> Operation[Answer] | None:
    """Return the operation of a request that means something else on such a fleet; None if it means what it always means."""
    at, call = (request.engine, request.call) if isinstance(request, AtEngine) else (None, request)
    if fleet.mode is None:
        return None if at is None else _refused(OWN_GPUS)
    if at is not None and at not in fleet.engines:
        return _refused(_unknown(fleet, at), 404)
    if fleet.mode is FleetMode.COLOCATED and isinstance(call, _ABOUT_WEIGHTS):
        return _refused(KEEPS_WEIGHTS)
    return _operation(fleet, call, None) if at is None else _at_engine(fleet, call, at)


_ABOUT_WEIGHTS = (OpenGroup, CloseGroup, Begin, Update, Tensors, End, SetLabel, NewRun, FromDisk)


def _operation(fleet: Fleet, call: Call, at: str | None) -> Operation[Answer] | None:
    match call:
        case ReleaseMemory():
            return _release(fleet, call, at)
        case ResumeMemory():
            return _resume(fleet, call, at)
        case Flush() if at is not None:
            return hybrid.flush_one(fleet, at, call) if fleet.mode is FleetMode.HYBRID else flush(fleet, call, [at])
    return hybrid.operation(fleet, call, at) if fleet.mode is FleetMode.HYBRID else None


async def _at_engine(fleet: Fleet, call: Call, at: str) -> Answer:
    """Answer a call at one engine's URL. The engine may have left the fleet by the time the operation gets its turn."""
    await turn()
    if at not in fleet.engines:
        raise RefusedError(_unknown(fleet, at), status=404)
    found = _operation(fleet, call, at)
    return await (found if found is not None else _refused(NOT_AT_ENGINES))


def _unknown(fleet: Fleet, at: str) -> str:
    return f"engine {at} is not in this fleet; its engines: {', '.join(fleet.engines)}."


async def _refused(why: str, status: int = 400) -> Answer:
    raise RefusedError(why, status=status)


async def _release(fleet: Fleet, ask: ReleaseMemory, at: str | None) -> Answer:
    """Release memory. Checksums are asked first: afterwards only a comparison tells whether the weights came back."""
    await take_turn(fleet, ask, at)
    await memory.note_checksums(fleet)
    silent = memory.engines_without_checksums(fleet)
    if silent:
        raise RefusedError(
            f"engine {silent[0]} did not return the checksum of its weights, so that they could not be compared after the sleep."
            " Nothing was released. Call again.",
            status=502,
        )
    if fleet.update is None:  # else it is refused
        more = ask.tags or MEMORY_TAGS
        await _note_trainer_memory(fleet, at, lambda tags: {*tags, *more})
    return await memory.release(fleet, ask, at)


async def _resume(fleet: Fleet, ask: ResumeMemory, at: str | None) -> Answer:
    """Resume memory. Answers only when the engines that have all of their memory serve."""
    await turn()
    if fleet.applied_state is not FleetState.ASLEEP:
        await _note_trainer_memory(fleet, at, lambda tags: {tag for tag in tags if ask.tags and tag not in ask.tags})
    if fleet.mode is FleetMode.HYBRID:
        return await hybrid.resume(fleet, ask, at)
    without = [name for name in fleet.up() if MemoryTag.WEIGHTS in _released(fleet.engines[name])]
    answer = await memory.resume(fleet, ask, at)
    back = [name for name in without if MemoryTag.WEIGHTS not in _released(fleet.engines[name])]
    if not back:
        await sync(fleet)
        return answer
    await memory.compare_woken(fleet, back)
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
        name
        for name, engine in fleet.members().items()
        if _tags_to_release(fleet, name) and engine.heard > fleet.rested and name not in in_update
    ]
    return [name for name in found if fleet.now >= fleet.engines[name].release_at]


async def release_trainer_memory(fleet: Fleet, names: list[str]) -> Answer:
    """Let these engines release what the trainer has."""
    for name in names:
        fleet.engines[name].release_at = fleet.now + RETRY_SECONDS
    await memory.note_checksums(fleet)
    silent = memory.engines_without_checksums(fleet)
    bodies = {name: {"tags": _tags_to_release(fleet, name)} for name in names if name not in silent}
    results = await send(ControlCall.RELEASE_MEMORY.path, bodies, fleet.policy.deadlines.pause_seconds)
    failed = failures(results)
    for name in bodies.keys() - failed.keys():
        memory.note_released(fleet.engines[name], [*_released(fleet.engines[name]), *bodies[name]["tags"]])
        fleet.engines[name].release_at = 0.0
    return Answer(200, f"{len(bodies) - len(failed)} of {len(names)} engines released the memory that the trainer has.")


def _released(engine: Engine) -> list[str]:
    return engine.status.released if engine.status is not None else []


def _tags_to_release(fleet: Fleet, name: str) -> list[str]:
    return [tag for tag in fleet.interruptions.trainer_memory(name) if tag not in _released(fleet.engines[name])]


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
