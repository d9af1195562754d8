"""Uploads of versions over HTTP: the uploader's tickets, and the routes for pieces at the data port."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from aiohttp import web

from sglang_rollout.staging.copies import Copies, Copy
from sglang_rollout.staging.differences import most_bytes
from sglang_rollout.staging.index import StagedError, StagedFault
from sglang_rollout.staging.serve import check_ticket, path_number
from sglang_rollout.wire.ports import BASE_HEADER, DIGEST_HEADER, FLEET_UPDATES
from sglang_rollout.wire.reasons import Refusal, RefusalCode, RefusedError
from sglang_rollout.wire.staged import DIGEST_PATTERN, UploadStatus
from sglang_rollout.wire.trainer import ControlReply

MAX_MISSING = 10_000
"""Missing pieces in one answer."""
READ_SECONDS = 60.0
"""Longest time until a further part of a piece arrives."""
PARALLEL_DIFFERENCES = 8
"""Differences that are in memory at a time. Each has at most half the bytes of a piece."""


@dataclass(frozen=True, slots=True)
class _Ticket:
    text: str
    expires_at: float
    """By the monotonic clock."""
    base: str = ""
    """Digest of the version from which pieces may come as differences; empty: all pieces come whole."""


class Uploads:
    """Who may upload pieces of which version, and until when.

    Args:
        copies: The versions.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._tickets: dict[str, _Ticket] = {}
        self.bytes = 0
        """Bytes of all pieces and differences that were uploaded."""
        self._differences = asyncio.Semaphore(PARALLEL_DIFFERENCES)

    def allow(self, update: str, ticket: str, seconds: float, base: str = "") -> None:
        """Accept pieces of an update with this ticket, for so many seconds; also differences from the version with digest ``base``."""
        self._tickets[update] = _Ticket(ticket, time.monotonic() + seconds, base)

    def forget(self, kept: Iterable[str]) -> None:
        """Delete the tickets of all updates but these."""
        kept = set(kept)
        self._tickets = {update: ticket for update, ticket in self._tickets.items() if update in kept}

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the data port."""
        update = f"{FLEET_UPDATES}/{{update}}"
        return [web.put(f"{update}/pieces/{{shard}}/{{piece}}", self.put_piece), web.get(update, self.get_status, allow_head=False)]

    async def put_piece(self, request: web.Request) -> web.StreamResponse:
        """Receive one piece. May be repeated, and runs in parallel with other pieces."""
        copy = self._authorize(request)
        shard, piece = path_number(request, "shard"), path_number(request, "piece")
        digest = request.headers.get(DIGEST_HEADER, "")
        if not re.match(DIGEST_PATTERN, digest):
            raise RefusedError(f"{request.path}: the header {DIGEST_HEADER} must hold the SHA-256 of the piece, 64 lower-case hex digits.")
        size = copy.index.piece_size(shard, piece)
        if copy.is_complete:
            raise RefusedError(Refusal(RefusalCode.CONFLICT, f"{request.path}: the version is complete and takes no further pieces."))
        if BASE_HEADER in request.headers:
            await self._receive_difference(request, copy, (shard, piece), digest)
        else:
            if request.content_length not in (None, size):
                raise RefusedError(f"{request.path}: the body has {request.content_length} bytes, but the piece has {size}.")
            if await copy.receive_piece(shard, piece, digest, _chunks(request, copy)):
                self.bytes += size
        await _drain(request, copy)
        return web.json_response(ControlReply(success=True, message="The piece has arrived.").model_dump(exclude_none=True))

    async def _receive_difference(self, request: web.Request, copy: Copy, place: tuple[int, int], digest: str) -> None:
        """Write a piece that differs from the same piece of the version that the update has named."""
        named, given = self._tickets[copy.update].base, request.headers[BASE_HEADER]
        if given != named or not named:
            named = f"began with the base {named[:12]}…" if named else "began without a base"
            raise RefusedError(f"{request.path}: {BASE_HEADER} is {given[:12]!r}…, but the update {named}. Send the whole piece.")
        base = self._copies.find(named)
        async with self._differences:
            difference = await _read_difference(request, copy, copy.index.piece_size(*place))
            try:
                added = base is not None and await copy.patch_piece(*place, digest, base, difference)
            except StagedError as error:
                if error.fault is not StagedFault.INCOMPLETE:
                    raise
                base = None  # its files are gone
        if base is None:
            message = f"{request.path}: the weight store does not have the base {named[:12]}… any more. Send the whole piece."
            raise RefusedError(Refusal(RefusalCode.BASE_MISSING, message))
        self.bytes += len(difference) if added else 0

    async def get_status(self, request: web.Request) -> web.StreamResponse:
        """Answer how much has arrived, and which pieces are missing."""
        copy = self._authorize(request)
        status = UploadStatus(update=copy.update, bytes=copy.index.bytes_arrived, missing=copy.index.missing(MAX_MISSING))
        return web.json_response(status.model_dump(mode="json"))

    def _authorize(self, request: web.Request) -> Copy:
        """Return the copy that an uploader may write. Raises RefusedError."""
        update = request.match_info["update"]
        copy, ticket = self._copies.get(update), self._tickets.get(update)
        if copy is None:
            message = "the weight store has no such update: it was aborted or replaced, or the store was restarted. Begin a new upload."
            raise RefusedError(Refusal(RefusalCode.NOT_FOUND, f"{request.path}: {message}"))
        if ticket is None:
            message = "the version is complete" if copy.is_complete else "the version arrives through a process group"
            raise RefusedError(Refusal(RefusalCode.CONFLICT, f"{request.path}: {message}, so it takes no uploads."))
        check_ticket(request, ticket.text)
        if time.monotonic() >= ticket.expires_at:
            message = "the ticket of this update has expired. Begin a new upload."
            raise RefusedError(Refusal(RefusalCode.FORBIDDEN, f"{request.path}: {message}"))
        return copy


async def _chunks(request: web.Request, copy: Copy) -> AsyncIterator[bytes]:
    """Yield the body as it arrives, and count its bytes for the copy.

    An uploader that stalls is cut off, because other uploads of the piece wait for it.
    """
    while True:
        try:
            async with asyncio.timeout(READ_SECONDS):
                chunk = await request.content.readany()
        except TimeoutError:
            message = f"{request.path}: no further bytes arrived within {READ_SECONDS:g} s. Send the piece again."
            raise RefusedError(Refusal(RefusalCode.UNAVAILABLE, message)) from None
        if not chunk:
            return
        copy.note_bytes(len(chunk))
        yield chunk


async def _read_difference(request: web.Request, copy: Copy, size: int) -> bytes:
    """Return the body, which may have half the bytes of the piece."""
    limit = most_bytes(size)
    held = bytearray()
    async for chunk in _chunks(request, copy):
        held += chunk
        if len(held) > limit:
            message = f"{request.path}: the difference has more than {limit} bytes, half of those of the piece. Send the whole piece."
            raise RefusedError(message)
    return bytes(held)


async def _drain(request: web.Request, copy: Copy) -> None:
    """Read the rest of the body of a repeated piece, so that the connection can be used again."""
    async for _ in _chunks(request, copy):
        pass
