"""Files that the engine's container and its agent share: drain requests, and the wish that the engine be killed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from sglang_rollout.agent import events as ev
from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.engine import EngineError
from sglang_rollout.wire.states import FleetState
from sglang_rollout.wire.weights import EngineState

log = logging.getLogger(__name__)


class RunFiles:
    """The shared folder, which is the boot file's.

    ``drain``: the engine is about to be stopped (its preStop hook touches it). ``drained``: nothing runs on it any more (the hook waits for
    it). ``kill``: the engine is stuck for good (its liveness probe fails while it exists).
    """

    def __init__(self, boot_file: Path) -> None:
        self.boot = boot_file
        self.drain = boot_file.parent / "drain"
        self.drained = boot_file.parent / "drained"
        self.kill = boot_file.parent / "kill"

    def drain_wanted(self) -> bool:
        """Whether the engine that runs now is to be drained; a request older than the engine's start was for the one before it."""
        try:
            asked = self.drain.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        try:
            return asked >= self.boot.stat().st_mtime_ns
        except FileNotFoundError:
            return True


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
