"""Building blocks of operations: call engines, fence them, resume them.

An operation is a coroutine that awaits effects and returns the answer for the trainer. The machine drives it without asyncio: an
operation does no I/O and reads no clock, so the same events always produce the same effects.
"""

from __future__ import annotations

import types
from collections.abc import Coroutine, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from sglang_rollout.coordinator.update.events import Result, Send, Write
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.requests import Answer, Body
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.agent import FenceRequest
from sglang_rollout.wire.ports import AGENT_FENCE, AGENT_RUN, AGENT_SYNC
from sglang_rollout.wire.record import Record
from sglang_rollout.wire.states import FleetState
from sglang_rollout.wire.weights import EngineState

COLLECTIVE = frozenset({ControlCall.INIT_GROUP.path, ControlCall.UPDATE_DISTRIBUTED.path})
"""Calls in which engines wait for the trainer in a collective: its death would hold them for as long as they may take."""
FENCE_DEADLINE = 15.0
"""A fence answers as soon as the agent has closed the gate; a scheduler that is stuck in a collective cannot be helped
over HTTP, and nobody should wait for it."""
SYNC_DEADLINE = 5.0
NOT_FOUND = 404
GRACE = 2.0
"""After one engine failed, how long the others may still take until the trainer is told."""
PATIENCE = 10.0
"""How much later than half of the engines another may answer a call that is the same work for all: more than a hiccup of the network, and
a trainer learns within seconds who is silent, not after ``deadlines.updateSeconds``."""

SLOWER = 10
"""So many times as long as those another may take: an engine on one GPU has eight times the tensors of one on eight to look through."""


@dataclass(frozen=True)
class Turn:
    """Step of an operation that waits until it is the only one that changes the fleet."""


@dataclass(frozen=True)
class Say:
    """Step of an operation that answers its caller now and continues."""

    answer: Answer


Results = Mapping[str, Result]
Step = Send | Write | Turn | Say
"""What an operation hands to the machine and waits for."""
_T = TypeVar("_T")
Operation = Coroutine[Any, Any, _T]
"""Code of one control call, or of one task of the coordinator's own. It awaits only the functions below."""


@types.coroutine
def _perform(step: Step) -> Generator[Step, Results, Results]:
    return (yield step)


async def turn() -> None:
    """Wait until this operation is the only one that changes the fleet. It keeps its turn until it ends."""
    await _perform(Turn())


async def reply(answer: Answer) -> None:
    """Answer the caller now and continue. Later answers of the same operation are dropped."""
    await _perform(Say(answer))


async def write(record: Record) -> Results:
    """Persist a record before the operation continues."""
    return await _perform(Write(record))


async def send(
    path: str,
    bodies: Mapping[str, Body],
    deadline: float,
    *,
    grace: float | None = None,
    patience: float | None = None,
    idempotent: bool = False,
) -> Results:
    """Call engines, all at once. No engines: no call."""
    if not bodies:
        return {}
    return await _perform(Send(path, bodies, deadline, grace=grace, patience=patience, idempotent=idempotent))


async def soil(
    fleet: Fleet, path: str, bodies: Mapping[str, Body], deadline: float, *, grace: float | None = None, patience: float | None = None
) -> Results:
    """The call that crosses the boundary. An engine that was told, and whose answer is lost, is dirty too."""
    told_now = [fleet.engines[name] for name in bodies]
    for engine in told_now:
        engine.soil()
    results = await send(path, bodies, deadline, grace=grace, patience=patience)
    for engine in told_now:
        engine.told_at = fleet.now
    return results


def same(names: Iterable[str], body: Body | None = None) -> dict[str, Body]:
    """The same body for each engine. SGLang wants a body on every POST: an empty one is ``{}``."""
    return {name: dict(body or {}) for name in names}


def failures(results: Results) -> dict[str, Result]:
    """The calls that failed; an engine's own reason comes before one that was only not waited for."""
    failed = {name: result for name, result in results.items() if not result.ok}
    return dict(sorted(failed.items(), key=lambda item: item[1].status == 0))


def told(results: Results) -> dict[str, Any]:
    """Per-engine results for the reply."""
    return {name: {"success": result.ok, "message": result.message} for name, result in results.items()}


async def fence(fleet: Fleet, names: Iterable[str], reason: str) -> Results:
    """Give up on these engines: sessions end, what is clean runs on, what is dirty stays closed."""
    body = FenceRequest(reason=reason, stuck_after=fleet.policy.deadlines.stuck_seconds).model_dump(mode="json")
    return await send(AGENT_FENCE, same(names, body), FENCE_DEADLINE, idempotent=True)


async def sync(fleet: Fleet, only: Iterable[str] | None = None) -> Results:
    """Tell agents (all, or ``only`` these) what is committed: this opens and closes gates."""
    body = fleet.sync_request().model_dump(mode="json")
    names = [name for name, engine in fleet.engines.items() if engine.reachable and (only is None or name in only)]
    return await send(AGENT_SYNC, same(names, body), SYNC_DEADLINE, idempotent=True)


async def resume(fleet: Fleet, names: Iterable[str], body: Body | None = None) -> Results:
    """Let engines generate again: continue what is clean, fence what is not or does not answer."""
    clean, dirty = _apart(fleet, names)
    results = dict(await send(ControlCall.CONTINUE.path, same(clean, body), fleet.policy.deadlines.pause_seconds, patience=PATIENCE))
    for name, result in results.items():
        if result.ok and name in fleet.engines:
            fleet.engines[name].know(fleet.now, paused=False)
    results |= await _leave_behind(fleet, [*dirty, *failures(results)])
    return results


async def run(fleet: Fleet, names: Iterable[str]) -> Results:
    """Tell all agents what is committed, and let these engines generate again: :func:`sync` and :func:`resume`, in one call to each."""
    clean, dirty = _apart(fleet, names)
    body = fleet.sync_request().model_dump(mode="json")
    results = dict(await send(AGENT_RUN, same(clean, body), fleet.policy.deadlines.pause_seconds, patience=PATIENCE))
    failed = failures(results)
    # While the operator is upgraded an agent may be of the release before: it knows the two calls, not the one.
    older = [name for name, result in failed.items() if result.status == NOT_FOUND]
    results |= await sync(fleet, [name for name in fleet.engines if name not in clean or name in older])
    await resume(fleet, older)
    await _leave_behind(fleet, [*dirty, *(name for name in failed if name not in older)])
    return results


def _apart(fleet: Fleet, names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Who may generate again, and who must be fenced.

    A dirty engine never gets a plain continue: its held requests would be answered from a mixture. In a fleet that its spec holds
    the clean ones stay paused.
    """
    clean: list[str] = []
    dirty: list[str] = []
    for name in names:
        engine = fleet.engines.get(name)
        status = engine.status if engine is not None else None
        if status is not None and status.released:
            continue  # nothing can run on it; it goes on when it has its memory back
        (dirty if status is not None and status.state is EngineState.DIRTY else clean).append(name)
    return (clean if fleet.applied_state is FleetState.ACTIVE else []), dirty


async def _leave_behind(fleet: Fleet, names: list[str]) -> Results:
    return await fence(fleet, names, "the fleet resumed and this engine did not or must not")
