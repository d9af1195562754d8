"""An engine whose process lives and does nothing: the kubelet sees it run, requests wait for ever, and no update is there to notice."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.engine import EngineError
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
