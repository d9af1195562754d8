"""Exchange of compiled kernels with the weight store: fetch them before the engine starts, and send them when the engine has them.

Kernels only save time, so a failure is logged, and the engine starts without them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from sglang_rollout.agent.kernels.archive import ArchiveError, KernelFile, fingerprint, list_kernels, measure, pack, unpack
from sglang_rollout.credentials import Credentials
from sglang_rollout.internal.receive import save_parts
from sglang_rollout.wire.kernels import MAX_ARCHIVE_BYTES
from sglang_rollout.wire.ports import DIGEST_HEADER, FILES_HEADER, KERNELS

log = logging.getLogger(__name__)

FETCH_SECONDS = 90.0
"""Most time in which kernels arrive. The agent answers its startup probe afterwards, for which the kubelet waits 120 s."""
SEND_SECONDS = 600.0
"""Most time in which the weight store receives kernels."""
RETRY_SECONDS = 300.0
"""Time from a failure to the next attempt to send."""
_CONNECT_SECONDS = 5.0
_READ_BYTES = 2**20
_ARRIVING = ".arriving"
"""Folder in the cache for an archive that is not unpacked yet."""
_ATTEMPTED = "kernels-attempted"
_FAILURES = (aiohttp.ClientError, OSError, TimeoutError, ValueError, ArchiveError)


class KernelExchange:
    """Compiled kernels of one pod.

    Args:
        folder: The cache of the engine.
        url: Data port of the weight store.
        credentials: Credentials of the kernels of this rollout.
        key: Key of the archive.
        state: Folder of the agent's records.
        quiet_seconds: Seconds without a changed kernel before kernels are sent.
    """

    def __init__(self, folder: Path, url: str, credentials: Credentials, key: str, state: Path, *, quiet_seconds: float = 30.0) -> None:
        self._folder = folder
        self._target = f"{url.rstrip('/')}{KERNELS}/{key}"
        self._credentials = credentials
        self._attempted = state / _ATTEMPTED
        self._arriving = folder / _ARRIVING
        self._seen = ""
        """Fingerprint of the kernels at the last check."""
        self._not_before = 0.0
        self.quiet_seconds = quiet_seconds
        self.is_up: Callable[[], bool] = lambda: False
        """Return True while the engine serves."""

    async def fetch(self) -> None:
        """Fetch the kernels into an empty cache, once for each pod. The engine has not started yet."""
        deadline = time.monotonic() + FETCH_SECONDS
        try:
            if not await asyncio.to_thread(self._begin):
                return
            try:
                files = await self._download(deadline)
            finally:
                await asyncio.to_thread(shutil.rmtree, self._arriving, ignore_errors=True)
        except _FAILURES as error:
            log.warning("The engine starts without compiled kernels of other pods: %s.", _describe(error))
            return
        if files:
            log.info("The engine starts with %d files of compiled kernels of other pods.", files)
        else:
            log.info("The weight store has no compiled kernels for this pod yet.")

    async def offer(self) -> None:
        """Send the kernels to the weight store if they have not changed since the last call, and the store has fewer files."""
        if not self.is_up() or time.monotonic() < self._not_before:
            return
        try:
            files = await asyncio.to_thread(list_kernels, self._folder)
            found = fingerprint(files)
            is_quiet, self._seen = found == self._seen, found
            if files and is_quiet and await self._count_stored() < len(files):
                await self._send(files)
        except _FAILURES as error:
            log.warning(
                "The compiled kernels of this engine are not sent: %s. The next attempt is in %g s.", _describe(error), RETRY_SECONDS
            )
            self._not_before = time.monotonic() + RETRY_SECONDS

    def _begin(self) -> bool:
        """Record the attempt, and return True if kernels may be written: never beside a running engine. Raises OSError."""
        shutil.rmtree(self._arriving, ignore_errors=True)
        try:
            self._attempted.parent.mkdir(parents=True, exist_ok=True)
            self._attempted.touch(exist_ok=False)
        except FileExistsError:
            return False
        return not any(self._folder.iterdir())

    async def _download(self, deadline: float) -> int:
        """Return the number of files that have arrived; 0 if the weight store has none."""
        archive, files = self._arriving / "archive", self._arriving / "files"
        async with asyncio.timeout(deadline - time.monotonic()), self._request("GET") as answer:
            if answer.status == 404:
                return 0
            answer.raise_for_status()
            await asyncio.to_thread(self._arriving.mkdir)
            digest = await save_parts(answer.content.iter_chunked(_READ_BYTES), archive, MAX_ARCHIVE_BYTES)
            if digest != answer.headers.get(DIGEST_HEADER):
                raise ArchiveError("the archive has another digest than the weight store says")
        count = await asyncio.to_thread(unpack, archive, files, deadline)
        await asyncio.to_thread(_move_all, files, self._folder)
        return count

    async def _count_stored(self) -> int:
        """Return the number of files that the weight store has; 0 without an archive."""
        async with self._request("HEAD") as answer:
            if answer.status == 404:
                return 0
            answer.raise_for_status()
            return int(answer.headers.get(FILES_HEADER, "0"))

    async def _send(self, files: Sequence[KernelFile]) -> None:
        size, digest = await asyncio.to_thread(measure, pack(self._folder, files))
        headers = {DIGEST_HEADER: digest, FILES_HEADER: str(len(files)), "Content-Length": str(size)}
        async with self._request("PUT", headers, _parts(self._folder, files)) as answer:
            answer.raise_for_status()
        log.info("The weight store has %d files of compiled kernels of this engine, %d bytes.", len(files), size)

    @asynccontextmanager
    async def _request(
        self, method: str, headers: dict[str, str] | None = None, body: AsyncIterator[bytes] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=SEND_SECONDS, connect=_CONNECT_SECONDS)
        all_headers = self._credentials.header | (headers or {})
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.request(method, self._target, headers=all_headers, data=body) as answer,
        ):
            yield answer


async def _parts(folder: Path, files: Sequence[KernelFile]) -> AsyncIterator[bytes]:
    """Yield the parts of the archive. The files are read in a thread."""
    packed = pack(folder, files)
    while (part := await asyncio.to_thread(next, packed, None)) is not None:
        yield part


def _move_all(source: Path, target: Path) -> None:
    for entry in source.iterdir():
        os.rename(entry, target / entry.name)


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__
