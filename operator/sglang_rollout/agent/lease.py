"""The agent's own lease: an engine in the middle of something does not wait for ever for a coordinator that is gone."""

from __future__ import annotations

import logging
import time

from sglang_rollout.agent import state as s
from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.update import Fence
from sglang_rollout.wire.agent import FenceRequest
from sglang_rollout.wire.states import FleetState
from sglang_rollout.wire.weights import EngineState

log = logging.getLogger(__name__)


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
