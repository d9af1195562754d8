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
from sglang_rollout.wire.states import EngineState, FleetState

log = logging.getLogger(__name__)

_LEAST_PROBES = 4
"""Failed checks in a row before a restart. Time alone is no proof, because an agent that was suspended itself also sees time pass."""
_HEALTH_SECONDS = 25.0
"""SGLang's own limit on a health check that generates is 20 s."""


class Hang:
    """Requests the restart of an engine that was up, has no call to answer, and has been silent for too long."""

    def __init__(self, agent: Agent, kill_file: Path) -> None:
        self._agent = agent
        self._kill_file = kill_file
        self._asked_at = 0.0
        self._failed = 0
        self._silent_since: float | None = None
        self._asked_to_kill = False

    async def watch(self) -> None:
        """Check the engine once: a live engine generates a token."""
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
            if _should_answer(agent):  # otherwise a call has begun meanwhile that may keep it busy
                await self._silent(str(error), now)
            return
        self._failed, self._silent_since = 0, None
        if self._asked_to_kill:  # the engine answered again before the kubelet noticed the file
            self._kill_file.unlink(missing_ok=True)
            self._asked_to_kill = False

    async def _silent(self, why: str, asked_at: float) -> None:
        self._failed += 1
        self._silent_since = asked_at if self._silent_since is None else self._silent_since
        silence = time.monotonic() - self._silent_since
        log.warning("The engine has not answered for %.0f s: %s.", silence, why)
        if self._failed < _LEAST_PROBES or silence < self._agent.silent:
            return
        log.error("The engine has not answered for %.0f s although no call keeps it busy: requesting its restart.", silence)
        self._kill_file.touch()
        self._asked_to_kill = True
        self._failed, self._silent_since = 0, None  # request the restart once, then count again


def _should_answer(agent: Agent) -> bool:
    """Return whether the known engine process still runs and can answer: not paused, in no call and in no update."""
    memory = agent.state.memory
    boot = agent.engine.container_boot()
    if boot is None or boot != memory.boot_id:
        return False  # it starts, which the startup probe watches
    busy = memory.pending or memory.paused or memory.session or memory.released
    return not (busy or agent.fencing or (memory.state is EngineState.DIRTY and not memory.failed))


class Lease:
    """Gives up an update after the lease: the time without a coordinator's call that the last sync allows."""

    def __init__(self, agent: Agent, fence: Fence) -> None:
        self._agent = agent
        self._fence = fence

    async def watch(self) -> None:
        """Check the lease once; return when an expired update is given up."""
        agent = self._agent
        silence = time.monotonic() - agent.heard_at
        if silence < agent.lease or agent.fencing or not in_the_middle(agent.state):
            return
        agent.heard_at = time.monotonic()  # once for each lease
        reason = f"no coordinator has called for {silence:.0f} s"
        log.warning("The engine is paused or half updated, and %s: giving up the update.", reason)
        await self._fence.give_up(FenceRequest(reason=reason, stuck_after=agent.lease))


def in_the_middle(state: s.State) -> bool:
    """Return whether the engine waits for a coordinator: it is paused, or an update is open on it."""
    memory = state.memory
    waits = memory.paused and memory.hold is FleetState.ACTIVE and not memory.released  # otherwise it waits for the spec or for its memory
    unfinished = memory.state is EngineState.DIRTY and not memory.failed
    return state.up and (waits or memory.session or unfinished)


async def watch_drain(agent: Agent, files: RunFiles, others: Callable[[], bool] = lambda: False) -> None:
    """Check the files once: close the gate if a drain is requested, report an idle engine, end the drain after a restart.

    ``others`` returns whether another pod of the engine drains.
    """
    wanted = files.drain_wanted() or others()
    if wanted != agent.state.draining:
        agent.dispatch(ev.Draining(wanted))
        log.info("Draining: no new requests." if wanted else "The drained engine has been replaced.")
        if not wanted:
            files.drain.unlink(missing_ok=True)
            files.drained.unlink(missing_ok=True)
        return  # the gate closes first; the next check asks whether the engine is idle
    if wanted and not files.drained.exists() and await _idle(agent):
        files.drained.touch()
        log.info("Drained: no request runs on the engine.")


async def _idle(agent: Agent) -> bool:
    if not agent.state.up:
        return True
    if agent.view is not None and agent.view.ready:
        return False
    memory = agent.state.memory
    if memory.pending or (memory.state is EngineState.DIRTY and not memory.failed):
        return False  # stopping this engine would end the update for all engines
    if memory.paused and memory.hold is not FleetState.ACTIVE:
        return True  # paused requests wait for the spec and would never finish
    try:
        return await agent.engine.running() == 0
    except EngineError:
        return False  # silent is not idle; polls notice an engine that has ended
