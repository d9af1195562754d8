"""Cache of what the engines report about themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sglang_rollout.coordinator.agents import Agents
from sglang_rollout.coordinator.update.machine import Machine
from sglang_rollout.sglang.api import MODEL_INFO, MODELS, SERVER_INFO

log = logging.getLogger(__name__)

INFO_PATHS = (SERVER_INFO, MODEL_INFO, MODELS)
INFO_RETRY_SECONDS = 2.0
INFO_POLL_SECONDS = 0.5
FIRST_INFO_SECONDS = 15.0
"""How long a reader waits for the first answer of an engine: two reads and the pause between them."""


class EngineInfos:
    """Cache of the engines' replies at ``INFO_PATHS``, read once per boot ID in the background."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._known: dict[str, tuple[str, dict[str, Any]]] = {}
        self._due: dict[str, float] = {}
        self._answered = asyncio.Event()

    async def first(self, machine: Machine, path: str) -> dict[str, Any] | None:
        """Return the answer of the first engine that is up, or else of the first engine ever seen.

        Wait for the first answer while an engine is up, because a trainer may ask as soon as the engines serve.
        """
        if not self._known and machine.fleet.up():
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_INFO_SECONDS):
                    await self._answered.wait()
        return self._find(machine, path)

    def _find(self, machine: Machine, path: str) -> dict[str, Any] | None:
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
            self._due[name] = now + INFO_RETRY_SECONDS
            replies = await asyncio.gather(*(self._agents.get(name, path) for path in INFO_PATHS))
            found = {
                path: body for path, (status, body) in zip(INFO_PATHS, replies, strict=True) if status == 200 and isinstance(body, dict)
            }
            if len(found) == len(INFO_PATHS):
                self._known[name] = (boot, found)
                self._answered.set()
            else:
                log.info("engine %s does not answer yet: %s", name, [status for status, _ in replies])

    async def run(self, machine: Callable[[], Machine | None]) -> None:
        """Refresh the cache forever. ``machine`` returns the state machine."""
        while True:
            current = machine()
            if current is not None:
                await self.refresh(current)
            await asyncio.sleep(INFO_POLL_SECONDS)
