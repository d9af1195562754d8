"""What engines say of themselves, remembered for each life of an engine: readers never wait for a busy scheduler."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from sglang_rollout.coordinator.agents import Agents
from sglang_rollout.coordinator.update.machine import Machine
from sglang_rollout.sglang.api import MODEL_INFO, MODELS, SERVER_INFO

log = logging.getLogger(__name__)

PATHS = (SERVER_INFO, MODEL_INFO, MODELS)
AGAIN_AFTER = 2.0
EVERY = 0.5


class Infos:
    """Asks each engine once after it came up, in the background."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._known: dict[str, tuple[str, dict[str, Any]]] = {}
        self._due: dict[str, float] = {}

    def first(self, machine: Machine, path: str) -> dict[str, Any] | None:
        """What the first engine that is up says; else the first that ever was."""
        names = [*machine.fleet.up(), *machine.fleet.engines, *self._known]
        for name in names:
            known = self._known.get(name)
            if known is not None and path in known[1]:
                return dict(known[1][path])
        return None

    def all(self, machine: Machine, path: str) -> dict[str, dict[str, Any]]:
        """What each engine of the fleet says, as far as it is known."""
        known = self._known
        names = [name for name in machine.fleet.engines if name in known]
        return {name: known[name][1][path] for name in names if path in known[name][1]}

    async def settle(self, machine: Machine) -> None:
        """Ask those that are new in this life."""
        now = asyncio.get_running_loop().time()
        for name in machine.fleet.up():
            boot = machine.fleet.boot(name)
            known = self._known.get(name)
            if boot is None or (known is not None and known[0] == boot) or now < self._due.get(name, 0.0):
                continue
            self._due[name] = now + AGAIN_AFTER
            replies = await asyncio.gather(*(self._agents.get(name, path) for path in PATHS))
            found = {path: body for path, (status, body) in zip(PATHS, replies, strict=True) if status == 200 and isinstance(body, dict)}
            if len(found) == len(PATHS):
                self._known[name] = (boot, found)
            else:
                log.info("engine %s does not say yet what it is: %s", name, [status for status, _ in replies])

    async def run(self, machine: Any) -> None:
        """Keep asking, for ever. ``machine`` is called for the state machine."""
        while True:
            current = machine()
            if current is not None:
                await self.settle(current)
            await asyncio.sleep(EVERY)
