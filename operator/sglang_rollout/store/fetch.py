"""Copies of the committed version from the agents that hold it, for a weight store that has lost it."""

from __future__ import annotations

import asyncio
import logging

import aiohttp

from sglang_rollout.staging.copies import Copies
from sglang_rollout.staging.index import StagedError, StagedFault
from sglang_rollout.staging.pull import pull
from sglang_rollout.wire.staged import StageRequest, VersionEnd

log = logging.getLogger(__name__)


class Fetcher:
    """Copies versions, one at a time for each update.

    Args:
        copies: The versions.
        session: HTTP session for the agents.
    """

    def __init__(self, copies: Copies, session: aiohttp.ClientSession) -> None:
        self._copies = copies
        self._session = session
        self._running: dict[str, asyncio.Task[VersionEnd]] = {}

    async def fetch(self, request: StageRequest) -> None:
        """Copy a version completely. A repeated call replaces the one before, and what has arrived stays.

        Raises:
            StagedError: No agent has the right bytes, the deadline has passed, or the version was dropped meanwhile.
        """
        await self._cancel(request.update)
        copy = self._copies.open(request.update, request.ticket, request.size_limit)
        task = asyncio.create_task(pull(self._session, request, copy), name=f"copy of update {request.update} from agents")
        self._running[request.update] = task
        # The pull has the deadline of the request.
        await asyncio.wait({task})
        if self._running.get(request.update) is task:
            del self._running[request.update]
        if task.cancelled():
            raise StagedError(f"The copy of update {request.update} was ended by another call.", StagedFault.DELETED)
        log.info("Update %s was copied from the agents: %d bytes.", request.update, task.result().bytes)

    async def keep(self, updates: set[str]) -> None:
        """End the copies of all updates but these."""
        for update in self._running.keys() - updates:
            await self._cancel(update)

    async def _cancel(self, update: str) -> None:
        task = self._running.pop(update, None)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
