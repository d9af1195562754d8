"""Archives of compiled kernels in the weight store: one for each key, on a disk volume of the store's pod.

The store does not look into an archive. Agents of the rollout write and read them with a credential that nothing else has.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from sglang_rollout.credentials import Credentials
from sglang_rollout.internal.receive import save_parts
from sglang_rollout.internal.requests import check_token
from sglang_rollout.wire.kernels import KEY_PATTERN, MAX_ARCHIVE_BYTES, MAX_FILES
from sglang_rollout.wire.ports import DIGEST_HEADER, FILES_HEADER, KERNELS
from sglang_rollout.wire.reasons import Refusal, RefusalCode, RefusedError
from sglang_rollout.wire.staged import DIGEST_PATTERN
from sglang_rollout.wire.trainer import ControlReply

KEPT_BYTES = 2 * MAX_ARCHIVE_BYTES
"""Most bytes of all archives. The archive that was read or written longest ago is deleted first."""
RECEIVE_SECONDS = 600.0
"""Most time in which an archive arrives."""
_READ_BYTES = 2**20
_ARRIVING = ".arriving"
_NAME = re.compile(r"([0-9a-f]{64})-(\d+)-([0-9a-f]{64})\.tar")


class _Archive(NamedTuple):
    path: Path
    key: str
    files: int
    digest: str


class KernelArchives:
    """The archives.

    Args:
        folder: Folder of the archives. It is created if it is missing.
        credentials: Credentials of agents that read and write archives.

    Raises:
        OSError: The folder cannot be written.
    """

    def __init__(self, folder: Path, credentials: Credentials) -> None:
        self._folder = folder
        self._credentials = credentials
        self._lock = asyncio.Lock()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in folder.glob(f"{_ARRIVING}*"):
            left.unlink()

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the data port."""
        path = f"{KERNELS}/{{key}}"
        return [web.get(path, self.read), web.put(path, self.write)]

    async def read(self, request: web.Request) -> web.StreamResponse:
        """Return the archive of a key, and with HEAD only its headers."""
        archive = self._find(self._authorize(request))
        if archive is None:
            raise RefusedError(Refusal(RefusalCode.NOT_FOUND, f"{request.path}: there are no compiled kernels for this key."))
        os.utime(archive.path)
        return web.FileResponse(archive.path, headers={DIGEST_HEADER: archive.digest, FILES_HEADER: str(archive.files)})

    async def write(self, request: web.Request) -> web.StreamResponse:
        """Replace the archive of a key. One archive arrives at a time."""
        key = self._authorize(request)
        digest, files = request.headers.get(DIGEST_HEADER, ""), request.headers.get(FILES_HEADER, "")
        if not re.fullmatch(DIGEST_PATTERN, digest) or not re.fullmatch(r"[0-9]{1,6}", files) or int(files) > MAX_FILES:
            raise RefusedError(f"{request.path}: the headers {DIGEST_HEADER} and {FILES_HEADER} must describe the archive.")
        size = request.content_length
        if size is None or size > MAX_ARCHIVE_BYTES:
            raise RefusedError(f"{request.path}: the header Content-Length must be at most {MAX_ARCHIVE_BYTES}, not {size}.")
        if self._lock.locked():
            raise RefusedError(Refusal(RefusalCode.UNAVAILABLE, f"{request.path}: another archive arrives. Try again."))
        async with self._lock:
            await self._receive(request, size, _Archive(self._folder / f"{key}-{int(files)}-{digest}.tar", key, int(files), digest))
        return web.json_response(ControlReply(success=True, message="The archive has arrived.").model_dump(exclude_none=True))

    async def _receive(self, request: web.Request, size: int, archive: _Archive) -> None:
        arriving = self._folder / f"{_ARRIVING}-{secrets.token_hex(8)}"
        try:
            async with asyncio.timeout(RECEIVE_SECONDS):
                digest = await save_parts(request.content.iter_chunked(_READ_BYTES), arriving, size)
            if digest != archive.digest:
                raise RefusedError(f"{request.path}: the archive has another digest than {DIGEST_HEADER}.")
            await asyncio.to_thread(self._make_room, archive.key, size)
            os.replace(arriving, archive.path)
            self._delete_earlier(archive)
        except TimeoutError:
            message = f"{request.path}: the archive did not arrive within {RECEIVE_SECONDS:g} s."
            raise RefusedError(Refusal(RefusalCode.UNAVAILABLE, message)) from None
        finally:
            arriving.unlink(missing_ok=True)

    def _make_room(self, key: str, size: int) -> None:
        """Delete archives of other keys until an archive of this size fits."""
        others = sorted((archive for archive in self._list() if archive.key != key), key=lambda archive: archive.path.stat().st_mtime)
        kept = sum(archive.path.stat().st_size for archive in others)
        for archive in others:
            if kept + size > KEPT_BYTES:
                kept -= archive.path.stat().st_size
                archive.path.unlink()

    def _delete_earlier(self, newest: _Archive) -> None:
        for archive in self._list():
            if archive.key == newest.key and archive.path != newest.path:
                archive.path.unlink()

    def _authorize(self, request: web.Request) -> str:
        """Return the key. Raises RefusedError."""
        check_token(request, self._credentials, process="weight store")
        key = request.match_info["key"]
        if not re.fullmatch(KEY_PATTERN, key):
            raise RefusedError(f"{request.path}: a key has 64 lower-case hex digits.")
        return key

    def _find(self, key: str) -> _Archive | None:
        return next((archive for archive in self._list() if archive.key == key), None)

    def _list(self) -> list[_Archive]:
        named = [(path, _NAME.fullmatch(path.name)) for path in self._folder.iterdir()]
        return [_Archive(path, found[1], int(found[2]), found[3]) for path, found in named if found]
