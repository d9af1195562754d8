"""Watches over one engine: ends an update that no coordinator leads, restarts a hung engine, and drains one that is about to stop.

Each watch looks about twice a second; ``cli`` runs them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from sglang_rollout.agent import events as ev
from sglang_rollout.agent import state as s
from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.engine import EngineError
from sglang_rollout.agent.run_files import RunFiles
from sglang_rollout.agent.update import Fence
from sglang_rollout.wire.agent import FenceRequest
from sglang_rollout.wire.states import FleetState
from sglang_rollout.wire.weights import EngineState

log = logging.getLogger(__name__)

_LEAST_PROBES = 4
"""So many must fail in a row. Time alone proves nothing: an agent that was stopped itself finds that much of it has passed."""
_HEALTH_SECONDS = 25.0
"""SGLang's own limit on a health check that generates is 20 s."""


class Hang:
    """Asks for the restart of an engine that was up in this life, has no call to answer, and has been silent for too long."""

    def __init__(self, agent: Agent, kill_file: Path) -> None:
        self._agent = agent
        self._kill_file = kill_file
        self._asked_at = 0.0
        self._failed = 0
        self._silent_since: float | None = None
        self._asked_to_kill = False

    async def watch(self) -> None:
        """One look. An engine that is asked for a token and gives none has nothing to say at all."""
        agent, now = self._agent, time.monotonic()
        if not _should_answer(agent):
            self._failed, self._silent_since = 0, None
            return
        if now - self._asked_at < agent.silent / (_LEAST_PROBES + 1):
            return
        self._asked_at = now
        try:
            await agent.engine.prove_alive(timeout=max(1.0, min(agent.silent / _LEAST_PROBES, _HEALTH_SECONDS)))
        except EngineError as error:
            if _should_answer(agent):  # else a call has begun meanwhile that may keep it busy
                await self._silent(str(error), now)
            return
        self._failed, self._silent_since = 0, None
        if self._asked_to_kill:  # it came back before the kubelet looked
            self._kill_file.unlink(missing_ok=True)
            self._asked_to_kill = False

    async def _silent(self, why: str, asked_at: float) -> None:
        self._failed += 1
        self._silent_since = asked_at if self._silent_since is None else self._silent_since
        silence = time.monotonic() - self._silent_since
        log.warning("The engine gave no sign of life for %.0f s: %s.", silence, why)
        if self._failed < _LEAST_PROBES or silence < self._agent.silent:
            return
        log.error("The engine has been silent for %.0f s though nothing keeps it busy: asking for its restart.", silence)
        self._kill_file.touch()
        self._asked_to_kill = True
        self._failed, self._silent_since = 0, None  # once for each time that it takes to become silent


def _should_answer(agent: Agent) -> bool:
    """Whether the life of the engine that the agent knows is still there, and free to answer: not paused, in no call and no update."""
    memory = agent.state.memory
    boot = agent.engine.container_boot()
    if boot is None or boot != memory.boot_id:
        return False  # it starts, and the startup probe watches over that
    busy = memory.pending or memory.paused or memory.session or memory.released
    return not (busy or agent.fencing or (memory.state is EngineState.DIRTY and not memory.failed))


class Lease:
    """Gives an update up when no coordinator has spoken for as long as the last one allowed."""

    def __init__(self, agent: Agent, fence: Fence) -> None:
        self._agent = agent
        self._fence = fence

    async def watch(self) -> None:
        """One look. Returns when what had to be given up is given up."""
        agent = self._agent
        silence = time.monotonic() - agent.heard_at
        if silence < agent.lease or agent.fencing or not in_the_middle(agent.state):
            return
        agent.heard_at = time.monotonic()  # once for each lease
        reason = f"no coordinator has spoken for {silence:.0f} s"
        log.warning("The engine is paused or half updated, and %s: giving up.", reason)
        await self._fence.give_up(FenceRequest(reason=reason, stuck_after=agent.lease))


def in_the_middle(state: s.State) -> bool:
    """Whether the engine waits for somebody to go on: it is paused, or an update is open on it."""
    memory = state.memory
    waits = memory.paused and memory.hold is FleetState.ACTIVE and not memory.released  # else it waits for who holds it, or has its memory
    unfinished = memory.state is EngineState.DIRTY and not memory.failed
    return state.up and (waits or memory.session or unfinished)


async def watch_drain(agent: Agent, files: RunFiles, others: Callable[[], bool] = lambda: False) -> None:
    """One look at the files: close the gate when a drain is asked for, report when the engine is idle, forget it after a restart.

    ``others``: whether another pod of the engine is to be drained.
    """
    wanted = files.drain_wanted() or others()
    if wanted != agent.state.draining:
        agent.dispatch(ev.Draining(wanted))
        log.info("Draining: no new requests." if wanted else "The drained engine has been replaced.")
        if not wanted:
            files.drain.unlink(missing_ok=True)
            files.drained.unlink(missing_ok=True)
        return  # the gate moves first; whether the engine is idle is asked the next time
    if wanted and not files.drained.exists() and await _idle(agent):
        files.drained.touch()
        log.info("Drained: nothing runs on the engine.")


async def _idle(agent: Agent) -> bool:
    if not agent.state.up:
        return True
    if agent.view is not None and agent.view.ready:
        return False
    memory = agent.state.memory
    if memory.pending or (memory.state is EngineState.DIRTY and not memory.failed):
        return False  # an update is under way: all its engines would lose it with this one
    if memory.paused and memory.hold is not FleetState.ACTIVE:
        return True  # what it holds back would wait for the spec to change, not for its pod to go
    try:
        return await agent.engine.running() == 0
    except EngineError:
        return False  # silent is not idle; an engine that is gone is noticed by the watch over it
