"""Copy versions into the memory of the pod: one task for each update, which continues after the coordinator's call is answered."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from sglang_rollout import bounded
from sglang_rollout.agent.staged.saved import SavedVersions
from sglang_rollout.staging.copies import Copies, Copy
from sglang_rollout.staging.index import StagedError, StagedFault
from sglang_rollout.staging.pull import pull
from sglang_rollout.wire.reasons import Refusal, RefusalCode, RefusedError
from sglang_rollout.wire.staged import StageRequest, VersionEnd

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
_SILENT_SECONDS = 60.0
"""Time without a byte after which a connection to a parent has failed."""
_PATIENCE_SECONDS = 60.0
"""Time without a new byte after which the copy of a committed version has failed, if each parent has been asked.

Its parents hold the whole version, so they have lost it or cannot be reached. The coordinator then names other parents, or a newer version.
"""
_CODES = {
    StagedFault.INVALID: RefusalCode.INVALID_REQUEST,
    StagedFault.TOO_LARGE: RefusalCode.INVALID_REQUEST,
    StagedFault.NO_SPACE: RefusalCode.UNAVAILABLE,
    StagedFault.LATE: RefusalCode.UNAVAILABLE,
    StagedFault.WRONG_BYTES: RefusalCode.UPSTREAM_FAILED,
    StagedFault.WRONG_DIGEST: RefusalCode.UPSTREAM_FAILED,
}
"""Codes of refusals; ``Conflict`` for every other fault."""


def open_session() -> aiohttp.ClientSession:
    """Return a session for copies from parents."""
    timeout = aiohttp.ClientTimeout(total=None, connect=_CONNECT_SECONDS, sock_read=_SILENT_SECONDS)
    return bounded.open_session(timeout=timeout, connector=bounded.open_connector(limit=0))


@dataclass(frozen=True, slots=True)
class _Copying:
    """A copy in progress."""

    request: StageRequest
    task: asyncio.Task[VersionEnd]


class Stager:
    """Starts, continues and deletes copies.

    A copy that is being loaded stays unchanged.

    Args:
        copies: The copies of this pod.
        saved: What is remembered of each version; deleted with its copy.
        session: HTTP session for the parents.
        updates_in_use: Returns the updates whose copies are being loaded, which no call deletes.
    """

    def __init__(
        self,
        copies: Copies,
        saved: SavedVersions,
        session: aiohttp.ClientSession,
        updates_in_use: Callable[[], set[str]],
    ) -> None:
        self._copies = copies
        self._saved = saved
        self._session = session
        self._updates_in_use = updates_in_use
        self._running: dict[str, _Copying] = {}
        self._lock = asyncio.Lock()

    async def stage(self, request: StageRequest, deadline: float) -> None:
        """Start or continue the copy of a version, and delete the copies that the request does not keep.

        Args:
            request: The request. With a digest: wait for the complete copy.
            deadline: Seconds to wait.

        Raises:
            RefusedError: The version cannot be copied, is not complete in time, or has another digest.
        """
        try:
            copy, running = await self._start(request)
            if not request.digest:
                return
            end = time.monotonic() + deadline
            await self._wait(running, request.update, deadline)
            if _digest(copy) != request.digest:  # the copy began before its digest was known; a copy that knows it asks all parents
                copy, running = await self._start(request)
                await self._wait(running, request.update, end - time.monotonic())
        except StagedError as error:
            raise RefusedError(Refusal(_CODES.get(error.fault, RefusalCode.CONFLICT), str(error))) from None

    async def drop(self, update: str) -> None:
        """Delete the copy of an update, and no other one, unless it is being loaded. Returns when its space is free."""
        async with self._lock:
            await self._forget({copy.update for copy in self._copies.status()} - ({update} - self._updates_in_use()))

    async def close(self) -> None:
        """End all copies in progress. They are deleted at the next start."""
        async with self._lock:
            for update in list(self._running):
                await self._cancel(update)

    async def _forget(self, kept: set[str]) -> None:
        for update in [update for update in self._running if update not in kept]:
            await self._cancel(update)
        await self._copies.keep(kept)
        await asyncio.to_thread(self._saved.keep, kept)

    async def _start(self, request: StageRequest) -> tuple[Copy, asyncio.Task[VersionEnd] | None]:
        """Return the copy, and the task that completes it; None if it is complete."""
        async with self._lock:
            await self._forget({*request.keep, request.update, *self._updates_in_use()})
            copy, running = self._copies.open(request.update, request.ticket, request.size_limit), self._running.get(request.update)
            if running is not None and not running.task.done() and running.request.parents == request.parents:
                return copy, running.task
            await self._cancel(request.update)
            if copy.is_complete and request.digest in ("", _digest(copy)):
                copy.seal(request.version)  # its label may not have been known
                return copy, None
            if request.update in self._updates_in_use():
                raise StagedError(f"The copy of update {request.update} is being loaded, and has another digest.", StagedFault.WRONG_DIGEST)
            base = self._copies.newest_besides(request.update)
            patience = math.inf if request.version is None else _PATIENCE_SECONDS
            work = pull(self._session, request, copy, base, patience=patience)
            task = asyncio.create_task(work, name=f"copy of update {request.update}")
            task.add_done_callback(_log_failure)
            self._running[request.update] = _Copying(request, task)
            return copy, task

    async def _wait(self, task: asyncio.Task[VersionEnd] | None, update: str, seconds: float) -> None:
        """Return when the copy is complete. Raise StagedError if it fails, or is late."""
        if task is None:
            return
        await asyncio.wait({task}, timeout=max(0.0, seconds))
        if not task.done():
            raise StagedError(f"The copy of update {update} is not complete in time; it continues.", StagedFault.LATE)
        if task.cancelled():
            raise StagedError(f"The copy of update {update} was ended by another call.", StagedFault.DELETED)
        task.result()

    async def _cancel(self, update: str) -> None:
        running = self._running.pop(update, None)
        if running is not None:
            running.task.cancel()
            await asyncio.wait({running.task})


def _digest(copy: Copy) -> str:
    return copy.index.end.digest if copy.index.end is not None else ""


def _log_failure(task: asyncio.Task[VersionEnd]) -> None:
    if task.cancelled():
        return
    error = task.exception()
    if isinstance(error, StagedError):
        log.warning("The %s failed: %s", task.get_name(), error)
    elif error is not None:
        log.error("A defect in the %s.", task.get_name(), exc_info=error)
