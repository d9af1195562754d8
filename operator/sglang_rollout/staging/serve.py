"""Give staged versions to other pods: the index as a long poll, and pieces straight from their file.

The store and every agent serve these routes on their data port. Readers present the ticket of the version.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import IO, Protocol

from aiohttp import web

from sglang_rollout.staging.copies import Copy
from sglang_rollout.staging.index import StagedError
from sglang_rollout.staging.send_file import send_bytes, send_file
from sglang_rollout.staging.snapshots import SnapshotCopy
from sglang_rollout.wire.ports import BASE_HEADER, STAGED, TICKET_HEADER
from sglang_rollout.wire.reasons import Refusal, RefusalCode, RefusedError, reason_phrase
from sglang_rollout.wire.staged import IndexEntry, IndexReply
from sglang_rollout.wire.trainer import ControlReply

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_WAIT_SECONDS = 25.0
"""Longest time that a question for entries waits."""
_MAX_ENTRIES = 2000
"""Entries of one reply."""
_MAX_TENSORS = 20_000
"""Tensors of one reply; one shard may have more."""


class FindsCopies(Protocol):
    """Finds the copy of an update, such as ``Copies``."""

    def get(self, update: str) -> Copy | None:
        """Return the copy of an update; None if there is none."""


def staging_routes(copies: FindsCopies) -> list[web.RouteDef]:
    """Return the routes below ``STAGED`` for these copies."""
    routes = _Routes(copies)
    return [
        web.get(f"{STAGED}/{{update}}/index", answer_refusals(routes.index), allow_head=False),
        web.get(f"{STAGED}/{{update}}/pieces/{{shard}}/{{piece}}", answer_refusals(routes.piece), allow_head=False),
    ]


def answer_refusals(handler: Handler) -> Handler:
    """Return a handler that answers a RefusedError with its status, its code and its message."""

    async def answered(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except RefusedError as error:
            body = ControlReply(success=False, message=str(error), code=error.refusal.code).model_dump(mode="json", exclude_none=True)
            return web.json_response(body, status=error.status, reason=reason_phrase(str(error)), headers=error.headers)

    return answered


def _open_piece(copy: Copy, shard: int, piece: int, base: str) -> tuple[IO[bytes], int, int, dict[str, str]]:
    """Return a file with the offset and the bytes of a piece, or of its difference from a base, and the headers of the answer."""
    kept = copy.differences.find(base, shard, piece)
    if kept is not None:
        with suppress(FileNotFoundError):  # deleted at this moment
            return kept[0].open("rb", buffering=0), 0, kept[1], {BASE_HEADER: base}
    path, offset, size = copy.piece_location(shard, piece)
    return path.open("rb", buffering=0), offset, size, {}


def check_ticket(request: web.Request, ticket: str) -> None:
    """Raise RefusedError unless the request presents this ticket. No request presents an empty ticket."""
    given = request.headers.get(TICKET_HEADER, "").encode("utf-8", "surrogateescape")
    if not ticket or not hmac.compare_digest(given, ticket.encode()):
        message = f"{request.path}: the header {TICKET_HEADER} does not hold the ticket of this version."
        raise RefusedError(Refusal(RefusalCode.FORBIDDEN, message))


def path_number(request: web.Request, part: str) -> int:
    """Return a number of the path. Raises RefusedError for anything else."""
    return _number(request, part, request.match_info[part])


class _Routes:
    def __init__(self, copies: FindsCopies) -> None:
        self._copies = copies

    async def index(self, request: web.Request) -> web.StreamResponse:
        """Return the entries from a position on; wait for one if there is none, unless the copy of this pod has failed."""
        copy = self._find(request)
        position, seconds = _number(request, "from", request.query.get("from", "0")), _wait_seconds(request)
        await copy.wait_for_entries(position, seconds)
        entries = copy.index.entries
        if copy.is_deleted:
            raise self._unknown(request)
        if position > len(entries):
            message = f"{request.path}: the index has {len(entries)} entries, not {position}: the copy was started again. Read from 0."
            raise RefusedError(Refusal(RefusalCode.CONFLICT, message))
        if position == len(entries) and copy.failure:
            raise RefusedError(Refusal(RefusalCode.UNAVAILABLE, f"{request.path}: nothing more arrives here: {copy.failure}"))
        chosen = _choose_entries(entries, position)
        reply = IndexReply(entries=chosen, next=position + len(chosen), received=copy.bytes_received)
        return web.Response(text=reply.model_dump_json(exclude_none=True), content_type="application/json")

    async def piece(self, request: web.Request) -> web.StreamResponse:
        """Return the bytes of a piece, or its difference from the version that the reader has."""
        copy = self._find(request)
        shard, piece = path_number(request, "shard"), path_number(request, "piece")
        if (shard, piece) not in copy.index.digests:
            message = f"{request.path}: this piece has not arrived here."
            raise RefusedError(Refusal(RefusalCode.UNAVAILABLE, message), status=404, headers={"Retry-After": "1"})
        if isinstance(copy, SnapshotCopy):
            return await self._send_snapshot(request, copy, shard, piece)
        try:
            file, offset, size, headers = _open_piece(copy, shard, piece, request.headers.get(BASE_HEADER, ""))
        except (StagedError, FileNotFoundError):  # deleted at this moment
            raise self._unknown(request) from None
        with file:
            return await send_file(request, file, offset, size, headers)

    async def _send_snapshot(self, request: web.Request, copy: SnapshotCopy, shard: int, piece: int) -> web.StreamResponse:
        path, offset, size = copy.piece_location(shard, piece)
        try:
            return await send_bytes(request, copy.volume.read(path, offset, size), size)
        except FileNotFoundError:  # newer snapshots have replaced this one
            raise self._unknown(request) from None
        except ConnectionResetError:
            raise  # the answer had begun
        except (StagedError, OSError) as error:
            message = f"{request.path}: the snapshot cannot be read: {error}"
            raise RefusedError(Refusal(RefusalCode.UNAVAILABLE, message)) from None

    def _find(self, request: web.Request) -> Copy:
        copy = self._copies.get(request.match_info["update"])
        if copy is None:
            raise self._unknown(request)
        check_ticket(request, copy.ticket)
        return copy

    def _unknown(self, request: web.Request) -> RefusedError:
        return RefusedError(Refusal(RefusalCode.NOT_FOUND, f"{request.path}: there is no copy of this update here."))


def _choose_entries(entries: list[IndexEntry], position: int) -> list[IndexEntry]:
    chosen: list[IndexEntry] = []
    tensors = 0
    for entry in entries[position : position + _MAX_ENTRIES]:
        tensors += len(entry.shard.tensors) if entry.shard else 0
        if chosen and tensors > _MAX_TENSORS:
            break
        chosen.append(entry)
    return chosen


def _number(request: web.Request, name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise RefusedError(f"{request.path}: {name} must be a number from 0, not {text[:40]!r}.")
    return int(text)


def _wait_seconds(request: web.Request) -> float:
    text = request.query.get("wait", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_WAIT_SECONDS:
        raise RefusedError(f"{request.path}: wait must be seconds from 0 to {MAX_WAIT_SECONDS:g}, not {text[:40]!r}.")
    return seconds
