"""Information that engines report about themselves, cached per boot ID so that readers never wait for a busy scheduler."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from sglang_rollout.coordinator.agents import Agents
from sglang_rollout.coordinator.update.machine import Machine
from sglang_rollout.sglang.api import MODEL_INFO, MODELS, SERVER_INFO

log = logging.getLogger(__name__)

PATHS = (SERVER_INFO, MODEL_INFO, MODELS)
RETRY_SECONDS = 2.0
POLL_SECONDS = 0.5


class EngineInfos:
    """Asks each engine once per boot ID, in the background."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._known: dict[str, tuple[str, dict[str, Any]]] = {}
        self._due: dict[str, float] = {}

    def first(self, machine: Machine, path: str) -> dict[str, Any] | None:
        """Return the answer of the first engine that is up, or else of the first engine ever seen."""
        for name in [*machine.fleet.up(), *machine.fleet.engines, *self._known]:
            known = self._known.get(name)
            if known is not None and path in known[1]:
                return dict(known[1][path])
        return None

    async def refresh(self, machine: Machine) -> None:
        """Ask the engines whose boot ID is new."""
        now = asyncio.get_running_loop().time()
        for name in machine.fleet.up():
            boot = machine.fleet.boot(name)
            known = self._known.get(name)
            if boot is None or (known is not None and known[0] == boot) or now < self._due.get(name, 0.0):
                continue
            self._due[name] = now + RETRY_SECONDS
            replies = await asyncio.gather(*(self._agents.get(name, path) for path in PATHS))
            found = {path: body for path, (status, body) in zip(PATHS, replies, strict=True) if status == 200 and isinstance(body, dict)}
            if len(found) == len(PATHS):
                self._known[name] = (boot, found)
            else:
                log.info("engine %s does not answer yet: %s", name, [status for status, _ in replies])

    async def run(self, machine: Callable[[], Machine | None]) -> None:
        """Ask forever. ``machine`` returns the state machine."""
        while True:
            current = machine()
            if current is not None:
                await self.refresh(current)
            await asyncio.sleep(POLL_SECONDS)
