"""Building blocks of operations: call engines, fence them, resume them.

An operation is a coroutine that awaits effects and returns the answer for the trainer. The machine drives it without asyncio: an
operation does no I/O and reads no clock, so the same events always produce the same effects.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from sglang_rollout.coordinator.update.events import Result, Send, Write
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.requests import Answer, Body
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.agent import FenceRequest
from sglang_rollout.wire.ports import AGENT_FENCE, AGENT_RUN, AGENT_SYNC, STORE_JOIN, STORE_RECEIVE
from sglang_rollout.wire.record import Record
from sglang_rollout.wire.states import EngineState, FleetState

COLLECTIVE = frozenset({ControlCall.INIT_GROUP.path, ControlCall.UPDATE_DISTRIBUTED.path, STORE_JOIN, STORE_RECEIVE})
"""Calls in which engines, or the weight store, wait for the trainer in a collective. If the trainer dies, they wait for as long as the
deadline allows."""
FENCE_DEADLINE_SECONDS = 15.0
"""An agent answers a fence as soon as its gate is closed. A scheduler that is stuck in a collective cannot be helped over HTTP."""
SYNC_DEADLINE_SECONDS = 5.0
ANSWER_MARGIN_SECONDS = 5.0
"""How much longer the answer of an agent or of the weight store may take than the work that its request limits."""
PREFLIGHT_MARGIN_SECONDS = 2.0
"""How much longer than an agent tries to connect its answer may take."""
GRACE_SECONDS = 2.0
"""How long the other engines may still take after one engine failed, until the trainer gets its answer."""
PATIENCE_SECONDS = 10.0
"""How much later than half of the engines another one may answer a call that is the same work for all engines.

Longer than a hiccup of the network. A trainer learns within seconds which engine is silent, not after ``deadlines.updateSeconds``.
"""

SLOWEST_FACTOR = 10
"""How many times as long as half of the engines another one may take: one GPU reads eight times the tensors of one GPU of eight."""


@dataclass(frozen=True)
class Turn:
    """Step of an operation that waits until it is the only one that changes the fleet."""


@dataclass(frozen=True)
class Say:
    """Step of an operation that answers its caller now and continues."""

    answer: Answer


@dataclass(frozen=True)
class Until:
    """Step of an operation that waits for a condition, and gives its turn back meanwhile.

    Requests wait until it ends. The coordinator's own operations run, so that engines can come back.
    """

    condition: Callable[[], bool]
    seconds: float
    """Longest wait."""


Results = Mapping[str, Result]
Step = Send | Write | Turn | Say | Until
"""What an operation hands to the machine and waits for."""
_T = TypeVar("_T")
Operation = Coroutine[Any, Any, _T]
"""Code of one control call, or of one task of the coordinator itself. It awaits only the functions below."""


@types.coroutine
def _perform(step: Step) -> Generator[Step, Results, Results]:
    return (yield step)


async def turn() -> None:
    """Wait until this operation is the only one that changes the fleet. It keeps its turn until it ends."""
    await _perform(Turn())


async def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until a condition holds, or until the time is over. The fleet may have changed meanwhile."""
    if not condition():
        await _perform(Until(condition, seconds))


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
    ends_held: bool = False,
) -> Results:
    """Call engines, all at once, and return one result per engine. Without engines there is no call."""
    if not bodies:
        return {}
    return await _perform(Send(path, bodies, deadline, grace=grace, patience=patience, idempotent=idempotent, ends_held=ends_held))


async def send_and_mark_dirty(
    fleet: Fleet, path: str, bodies: Mapping[str, Body], deadline: float, *, grace: float | None = None, patience: float | None = None
) -> Results:
    """Send the first call that may modify weights. Engines are marked dirty before it is sent, so a lost reply is safe."""
    called = [fleet.engines[name] for name in bodies]
    for engine in called:
        engine.mark_dirty()
    results = await send(path, bodies, deadline, grace=grace, patience=patience)
    for engine in called:
        engine.changed_seq = fleet.next_seq()
    return results


def same_body(names: Iterable[str], body: Body | None = None) -> dict[str, Body]:
    """Return the same body for each engine. SGLang wants a body on every POST: an empty one is ``{}``."""
    return {name: dict(body or {}) for name in names}


def failures(results: Results) -> dict[str, Result]:
    """Return the calls that failed. An engine with a reason of its own comes before an engine that merely did not answer in time."""
    failed = {name: result for name, result in results.items() if not result.ok}
    return dict(sorted(failed.items(), key=lambda item: item[1].status == 0))


def results_by_engine(results: Results) -> dict[str, Any]:
    """Return the results of a call as the reply shows them."""
    return {name: {"success": result.ok, "message": result.message} for name, result in results.items()}


async def fence(fleet: Fleet, names: Iterable[str], reason: str) -> Results:
    """Give up an update on these engines: sessions end, clean engines resume, dirty engines stay closed, or restart if they must."""
    stuck_after, doubt = fleet.policy.deadlines.stuck_seconds, fleet.weights.doubt
    restarts = {name: doubt.must_restart(name, fleet.boot(name)) for name in names}
    requests = {name: FenceRequest(message=reason, restart=restart, stuck_after=stuck_after) for name, restart in restarts.items()}
    bodies = {name: request.model_dump(mode="json") for name, request in requests.items()}
    return await send(AGENT_FENCE, bodies, FENCE_DEADLINE_SECONDS, idempotent=True)


async def sync(fleet: Fleet, only: Iterable[str] | None = None) -> Results:
    """Send agents (all, or ``only`` these) the committed version. This opens and closes gates."""
    body = fleet.sync_request().model_dump(mode="json")
    names = [name for name, engine in fleet.engines.items() if engine.reachable and (only is None or name in only)]
    return await send(AGENT_SYNC, same_body(names, body), SYNC_DEADLINE_SECONDS, idempotent=True)


async def find_lost(fleet: Fleet, failed: Iterable[str], boots: Mapping[str, str | None]) -> set[str]:
    """Ask the agents of engines that failed a call, and return the engines that are gone, down, drained or restarted.

    Args:
        fleet: The fleet.
        failed: The engines that failed.
        boots: Boot ID of each engine before the call.
    """
    names = list(failed)
    heard = await sync(fleet, names)

    def is_lost(name: str) -> bool:
        engine = fleet.engines.get(name)
        answers = name in heard and heard[name].ok
        return engine is None or not answers or not engine.member or engine.boot != boots.get(name)

    return {name for name in names if is_lost(name)}


async def resume(fleet: Fleet, names: Iterable[str], body: Body | None = None) -> Results:
    """Let engines generate again: continue clean engines, fence engines that are dirty or do not answer."""
    clean, dirty = _split_clean_and_dirty(fleet, names)
    limit = fleet.policy.deadlines.pause_seconds
    results = dict(await send(ControlCall.CONTINUE.path, same_body(clean, body), limit, patience=PATIENCE_SECONDS))
    for name, result in results.items():
        if result.ok and name in fleet.engines:
            fleet.engines[name].anticipate(fleet.next_seq(), paused=False)
    results |= await _fence_the_rest(fleet, [*dirty, *failures(results)])
    return results


async def sync_and_resume(fleet: Fleet, names: Iterable[str], *, only_these: bool = False) -> Results:
    """Send all agents the committed version and resume these engines: :func:`sync` and :func:`resume` in one call per engine.

    Args:
        fleet: The fleet.
        names: Engines to resume.
        only_these: True: the other agents receive nothing.
    """
    names = list(names)
    clean, dirty = _split_clean_and_dirty(fleet, names)
    body = fleet.sync_request().model_dump(mode="json")
    results = dict(await send(AGENT_RUN, same_body(clean, body), fleet.policy.deadlines.pause_seconds, patience=PATIENCE_SECONDS))
    failed = failures(results)
    others = set(names) if only_these else fleet.engines.keys()
    results |= await sync(fleet, others - set(clean))
    await _fence_the_rest(fleet, [*dirty, *failed])
    return results


def _split_clean_and_dirty(fleet: Fleet, names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the engines that may generate again and those that must be fenced.

    A dirty engine never gets a plain continue: SGLang would answer its held requests from a mixture. While ``spec.state`` pauses the fleet,
    clean engines stay paused.
    """
    clean: list[str] = []
    dirty: list[str] = []
    for name in names:
        engine = fleet.engines.get(name)
        status = engine.status if engine is not None else None
        if status is not None and status.released:
            continue  # nothing can run on this engine until its memory is resumed
        (dirty if status is not None and status.state is EngineState.DIRTY else clean).append(name)
    return (clean if fleet.applied_state is FleetState.ACTIVE else []), dirty


async def _fence_the_rest(fleet: Fleet, names: list[str]) -> Results:
    return await fence(fleet, names, "the fleet resumed, and this engine did not or must not resume")
