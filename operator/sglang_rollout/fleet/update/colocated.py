"""A fleet on its trainer's GPUs (``spec.mode: Colocated``): it keeps the weights that it was started with, and it sleeps whenever its
trainer has the memory. Pure.

What the trainer has is said by its last release or resume. It is kept in the record, because engines and coordinators that start
later know nothing of that call.
"""

from __future__ import annotations

from collections.abc import Iterable

from sglang_rollout.fleet.ranks import Refusal
from sglang_rollout.fleet.update import memory
from sglang_rollout.fleet.update.calls import Script, Turn, failures, send, sync
from sglang_rollout.fleet.update.engine import Engine
from sglang_rollout.fleet.update.events import (
    Answer,
    Begin,
    CloseGroup,
    End,
    FromDisk,
    NewRun,
    OpenGroup,
    ReleaseMemory,
    Request,
    ResumeMemory,
    SetLabel,
    Update,
    Write,
)
from sglang_rollout.fleet.update.memory import WEIGHTS
from sglang_rollout.fleet.update.state import Fleet
from sglang_rollout.wire.states import KEEPS_WEIGHTS, FleetState

AGAIN = 10.0
"""Seconds after which an engine that did not give its memory back is asked again."""


def script(fleet: Fleet, request: Request) -> Script[Answer] | None:
    """What becomes of a request that means something else to such a fleet; None: nothing does."""
    if not fleet.colocated:
        return None
    match request:
        case ReleaseMemory():
            return _release(fleet, request)
        case ResumeMemory():
            return _resume(fleet, request)
        case OpenGroup() | CloseGroup() | Begin() | Update() | End() | SetLabel() | NewRun() | FromDisk():
            return _refused()
        case _:
            return None


def _refused() -> Script[Answer]:
    yield from ()
    raise Refusal(KEEPS_WEIGHTS)


def _release(fleet: Fleet, ask: ReleaseMemory) -> Script[Answer]:
    """What the weights are is asked before they are gone: afterwards only a comparison tells whether they came back."""
    yield Turn()
    yield from memory.note_checksums(fleet)
    silent = memory.unnoted(fleet)
    if silent:
        raise Refusal(
            f"engine {silent[0]} did not tell the checksum of its weights, so nobody could say after the sleep whether it holds them"
            " again. Nothing was released. Call again.",
            status=502,
        )
    yield from _keep(fleet, dict.fromkeys([*fleet.lent, *(ask.tags or memory.TAGS)]))
    return (yield from memory.release(fleet, ask))


def _resume(fleet: Fleet, ask: ResumeMemory) -> Script[Answer]:
    """Answers only when the engines that have all of their memory serve."""
    yield Turn()
    if fleet.kept is not FleetState.ASLEEP:
        yield from _keep(fleet, [tag for tag in fleet.lent if ask.tags and tag not in ask.tags])
    without = [name for name in fleet.up() if WEIGHTS in _released(fleet.engines[name])]
    answer = yield from memory.resume(fleet, ask)
    back = [name for name in without if WEIGHTS not in _released(fleet.engines[name])]
    if not back:
        yield from sync(fleet)
        return answer
    yield from memory.prove(fleet, back)
    committed = fleet.committed
    wrong = [name for name in back if committed is None or not fleet.engines[name].holds(committed)]
    if answer.success and wrong:
        message = f"engine {wrong[0]} has its memory back, but not the weights that it was started with: restart it. It serves nobody."
        return Answer(502, message, {"engine": wrong[0], "unproved": wrong})
    return answer


def due(fleet: Fleet) -> list[str]:
    """Engines that hold memory which the trainer has: they started since, or refused before."""
    if not fleet.colocated or fleet.kept is FleetState.ASLEEP:
        return []
    found = [name for name, engine in fleet.members().items() if _missing(fleet, engine) and engine.heard > fleet.rested]
    return [name for name in found if fleet.now >= fleet.engines[name].release_at]


def put_to_sleep(fleet: Fleet, names: list[str]) -> Script[Answer]:
    """Have these engines give back what the trainer has."""
    for name in names:
        fleet.engines[name].release_at = fleet.now + AGAIN
    yield from memory.note_checksums(fleet)
    silent = memory.unnoted(fleet)
    bodies = {name: {"tags": _missing(fleet, fleet.engines[name])} for name in names if name not in silent}
    results = yield from send(memory.RELEASE, bodies, fleet.policy.deadlines.pause)
    failed = failures(results)
    for name in bodies.keys() - failed.keys():
        memory.note_released(fleet.engines[name], [*_released(fleet.engines[name]), *bodies[name]["tags"]])
        fleet.engines[name].release_at = 0.0
    return Answer(200, f"{len(bodies) - len(failed)} of {len(names)} engines released the memory that the trainer has.")


def _released(engine: Engine) -> list[str]:
    return engine.status.released if engine.status is not None else []


def _missing(fleet: Fleet, engine: Engine) -> list[str]:
    return [tag for tag in fleet.lent if tag not in _released(engine)]


def _keep(fleet: Fleet, tags: Iterable[str]) -> Script[None]:
    """Written before any engine hears of it: a coordinator that starts a moment later would undo the call. When the store is away it is
    written later, as every record."""
    fleet.lent = tuple(tags)
    record = fleet.record()
    if record is not None:
        yield Write(record)
