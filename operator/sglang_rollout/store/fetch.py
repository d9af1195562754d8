"""Copies of versions that a weight store does not have in its memory: from the agents that hold them, or from its snapshots."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp

from sglang_rollout.checkpoints.folder import ProblemsError
from sglang_rollout.checkpoints.snapshots import lock_snapshot
from sglang_rollout.staging.copies import Copies, Copy
from sglang_rollout.staging.index import StagedError, StagedFault
from sglang_rollout.staging.pull import pull
from sglang_rollout.staging.snapshots import SnapshotCopy, load_pieces
from sglang_rollout.staging.volume import LOAD_SECONDS
from sglang_rollout.wire.staged import StageRequest, VersionEnd

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 3.0
"""Time without a new byte after which the agents are given up. They hold the whole version, so they have ended or cannot be reached.

The coordinator then names the agents that hold the version now, or the snapshot.
"""


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

    async def fetch(self, request: StageRequest, snapshot: SnapshotCopy | None = None) -> None:
        """Copy a version completely. A repeated call replaces the one before, and what has arrived stays.

        Args:
            request: The version.
            snapshot: Where it is read; None: from the agents that the request names.

        Raises:
            StagedError: No agent has the right bytes, no agent answers, the snapshot is damaged, the deadline has passed, or the version
                was dropped meanwhile.
        """
        await self._cancel(request.update)
        copy = self._copies.open(request.update, request.ticket, request.size_limit)
        work = _load(request, snapshot, copy) if snapshot else pull(self._session, request, copy, patience=PATIENCE_SECONDS)
        end = await self._run(request.update, work)
        if snapshot is not None:
            log.info("Update %s was copied from its snapshot %s: %d bytes.", request.update, snapshot.folder, end.bytes)

    async def _run(self, update: str, work: Coroutine[Any, Any, VersionEnd]) -> VersionEnd:
        """Run the copy of an update, which :meth:`keep` may end."""
        task = asyncio.create_task(work, name=f"copy of update {update}")
        self._running[update] = task
        # The work has a deadline of its own.
        await asyncio.wait({task})
        if self._running.get(update) is task:
            del self._running[update]
        if task.cancelled():
            raise StagedError(f"The copy of update {update} was ended by another call.", StagedFault.DELETED)
        return task.result()

    async def keep(self, updates: set[str]) -> None:
        """End the copies of all updates but these."""
        for update in self._running.keys() - updates:
            await self._cancel(update)

    async def _cancel(self, update: str) -> None:
        task = self._running.pop(update, None)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})


async def _load(request: StageRequest, source: SnapshotCopy, copy: Copy) -> VersionEnd:
    """Load a snapshot, and declare the copy complete."""
    if not copy.is_complete:
        await _load_before_deadline(source, copy, request.deadline)
    end = copy.seal(request.version)
    if end.digest != request.digest:
        message = f"The snapshot {source.folder.name} has digest {end.digest[:12]}…, not {request.digest[:12]}…."
        raise StagedError(message, StagedFault.WRONG_DIGEST)
    return end


async def _load_before_deadline(source: SnapshotCopy, copy: Copy, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            lock = await source.volume.run(lambda: _lock(source.folder), LOAD_SECONDS)
            try:
                await load_pieces(source, copy)
            finally:
                source.volume.start(lock.close)  # closing a file may hang, too
    except TimeoutError:
        message = f"The snapshot {source.folder.name} was not read within {seconds:g} s. Does its volume answer?"
        raise StagedError(message, StagedFault.LATE) from None


def _lock(folder: Path) -> ExitStack:
    """Keep a snapshot from being removed until the returned stack is closed. Raises StagedError if it is gone."""
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_snapshot(folder))
        except ProblemsError as error:
            raise StagedError(error.problems[0], StagedFault.DELETED) from None
        return stack.pop_all()
