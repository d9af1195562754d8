"""Copy a version from another pod while it still arrives there.

Parents are asked in order; the last one is the store, whose index decides where two parents contradict each other. What has arrived stays
when the parent changes. A digest that the coordinator demands is the last word on every parent.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from pydantic import ValidationError

from sglang_rollout.bounded import ERROR_BYTES, AnswerTooLargeError, read_json
from sglang_rollout.staging.copies import Copy
from sglang_rollout.staging.index import Index, StagedError, StagedFault
from sglang_rollout.staging.piece_reader import (
    BrokenAnswerError,
    Origin,
    PieceReader,
    RefusedPieceError,
    Target,
    describe_silence,
    describe_unreachable,
)
from sglang_rollout.wire.ports import STAGED, TICKET_HEADER
from sglang_rollout.wire.reasons import RefusalCode, end_sentence, quote_value
from sglang_rollout.wire.staged import IndexEntry, IndexReply, Piece, StageRequest, VersionEnd

log = logging.getLogger(__name__)

PARALLEL_PIECES = 4
"""Pieces that are copied at a time."""
POLL_SECONDS = 5.0
"""Time that a parent may wait for an entry before it answers."""
PATIENCE_SECONDS = 2.0
"""Time for which a parent may not know the update: the coordinator tells all pods at once."""
_PATIENCE_STEP_SECONDS = 0.1
_CONNECT_SECONDS = 5.0
_FIRST_SILENCE_SECONDS, _LAST_SILENCE_SECONDS = 5.0, 20.0
"""Times without a byte after which a parent's turn ends: in the first round through the parents, and after rounds without a new piece."""
_FIRST_DELAY_SECONDS, _LAST_DELAY_SECONDS = 0.25, 5.0
"""Times between two rounds through the parents."""
_MAX_REPLY_BYTES = 256 * 2**20


async def pull(
    session: aiohttp.ClientSession,
    request: StageRequest,
    copy: Copy,
    base: Copy | None = None,
    *,
    patience: float = math.inf,
) -> VersionEnd:
    """Complete a copy, and return its end. A copy that is complete already is checked against ``request.digest``.

    Only one pull at a time may work on a copy. Another pull with other parents continues where this one was cancelled. After a failure
    the readers of the copy turn to other pods.

    Args:
        session: HTTP session for the parents.
        request: What to copy, and from where.
        copy: The copy.
        base: A complete copy of another version: equal pieces come from it, and other pieces as differences if a parent has them.
        patience: Seconds without a new byte after which the copy fails, when each parent has been asked. If it is limited, the parents hold
            the whole version: one that has nothing new has lost it, and may itself wait for this pod.

    Raises:
        StagedError: The deadline or the patience has passed, the version is too large, there is no space, every parent gives wrong bytes,
            or the copy was deleted.
    """
    if not request.parents:
        raise StagedError(f"Update {request.update} has no parent to copy from.")
    work = _Pull(session, request, copy, base=base, patience=patience)
    copy.note_failure("")
    try:
        async with asyncio.timeout(request.deadline):
            return await work.run()
    except TimeoutError:
        error = work.late()
        copy.note_failure(str(error))
        raise error from None
    except StagedError as error:
        copy.note_failure(str(error))
        raise


class _ParentError(Exception):
    """A parent cannot give the version now; with ``is_wrong``, it is not asked again."""

    def __init__(self, message: str, *, is_wrong: bool = False) -> None:
        super().__init__(message)
        self.is_wrong = is_wrong


class _AbsentError(Exception):
    """The parent does not know the update."""


class _ContradictionError(Exception):
    """A parent's index contradicts what has arrived."""


class _Pull:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        request: StageRequest,
        copy: Copy,
        *,
        base: Copy | None,
        patience: float,
    ) -> None:
        self._session = session
        self._request = request
        self._copy = copy
        self._base = base
        self._patience = patience
        self._parents = [parent.rstrip("/") for parent in request.parents]
        self._silence_seconds = _FIRST_SILENCE_SECONDS
        self._problems: dict[str, str] = {}
        self._wrong: set[str] = set()
        self._bytes_from: dict[str, int] = {}

    async def run(self) -> VersionEnd:
        """Ask the parents in order, again and again."""
        if self._copy.is_complete:
            end = self._copy.seal(self._request.version)
            if self._request.digest in ("", end.digest):
                return end
            log.warning("The copy of update %s does not have the demanded digest, so it is started again.", self._copy.update)
            await self._copy.reset()
        clock = asyncio.get_running_loop().time
        delay, newest = _FIRST_DELAY_SECONDS, clock()
        while True:
            before, received = self._copy.index.bytes_arrived, self._copy.bytes_received
            for parent in [parent for parent in self._parents if parent not in self._wrong]:
                copied = await self._try(parent)
                if copied is not None:
                    self._log_sources(copied)
                    return copied
            if self._wrong.issuperset(self._parents):
                raise StagedError(
                    f"No parent gives the right bytes of update {self._copy.update}. {self._describe()}", StagedFault.WRONG_DIGEST
                )
            has_grown = self._copy.index.bytes_arrived > before
            if has_grown or self._copy.bytes_received > received:
                newest = clock()
            if has_grown:
                delay, self._silence_seconds = _FIRST_DELAY_SECONDS, _FIRST_SILENCE_SECONDS
            elif clock() - newest >= self._patience:
                message = f"No new byte of update {self._copy.update} has arrived for {clock() - newest:.0f} s. {self._describe()}"
                raise StagedError(message, StagedFault.LATE)
            else:
                delay, self._silence_seconds = min(2 * delay, _LAST_DELAY_SECONDS), min(2 * self._silence_seconds, _LAST_SILENCE_SECONDS)
            await asyncio.sleep(delay)

    def _log_sources(self, copied: VersionEnd) -> None:
        sources = ", ".join(f"{size} from {source}" for source, size in self._bytes_from.items())
        log.info("The copy of update %s is complete: %d bytes (%s).", self._copy.update, copied.bytes, sources or "none from other pods")

    def late(self) -> StagedError:
        """Return the error of a copy that is not complete at the deadline."""
        index = self._copy.index
        arrived = f"{index.bytes_arrived} of {index.bytes} announced bytes have arrived" if index.shards else "no shard has been announced"
        message = (
            f"The copy of update {self._copy.update} is not complete after {self._request.deadline:g} s: {arrived}. {self._describe()}"
        )
        return StagedError(message.rstrip(), StagedFault.LATE)

    async def _try(self, parent: str) -> VersionEnd | None:
        """Copy from one parent. Return None if the next parent's turn has come."""
        try:
            return await self._copy_from(parent)
        except _ContradictionError as error:
            if parent != self._parents[-1]:
                self._note(parent, f"{error}")
                return None
            log.warning("The copy of update %s contradicts its store, so it is started again: %s", self._copy.update, error)
        except _ParentError as error:
            self._note(parent, str(error))
            if error.is_wrong:
                self._wrong.add(parent)
            return None
        finally:
            _raise_if_cancelled()
        self._bytes_from.clear()
        await self._copy.reset()
        return await self._try(parent)  # an empty copy contradicts no index

    def _note(self, parent: str, problem: str) -> None:
        if self._problems.get(parent) != problem:
            log.warning("Update %s cannot be copied from %s: %s", self._copy.update, self._name(parent), problem)
        self._problems[parent] = problem

    def _describe(self) -> str:
        return " ".join(f"From {self._name(parent)}: {end_sentence(problem)}" for parent, problem in self._problems.items())

    def _name(self, parent: str) -> str:
        """Return the name of a parent with its address; the address alone if it has no name."""
        name = self._request.names.get(parent)
        return f"{name} ({parent})" if name else parent

    async def _copy_from(self, parent: str) -> VersionEnd:
        wanted: asyncio.Queue[Piece] = asyncio.Queue()
        reader = PieceReader(
            parent, self._headers(), parallel=PARALLEL_PIECES, connect_seconds=_CONNECT_SECONDS, read_seconds=self._silence_seconds
        )
        try:
            async with asyncio.TaskGroup() as group:
                workers = [group.create_task(self._fetch_pieces(reader, wanted)) for _ in range(PARALLEL_PIECES)]
                await self._follow(parent, wanted)
                await wanted.join()
                for worker in workers:
                    worker.cancel()
        except BaseExceptionGroup as errors:
            raise _first_error(errors) from errors
        finally:
            reader.close()
        return self._copy.seal(self._request.version)

    # The index

    async def _follow(self, parent: str, wanted: asyncio.Queue[Piece]) -> None:
        """Read the parent's index to its end, and ask for the pieces that are missing here."""
        theirs, received = Index(), 0
        while theirs.end is None:
            position = len(theirs.entries)
            reply = await self._read_entries(parent, position)
            for entry in reply.entries:
                try:
                    theirs.add(entry)
                except StagedError as error:
                    # A parent that has started again between two answers is read again from the start.
                    raise _ParentError(f"its index is wrong: {error}", is_wrong=position == 0) from error
                self._take_entry(parent, theirs, entry, wanted)
            has_stalled, received = reply.received == received, reply.received
            if reply.entries or not has_stalled:
                continue
            if self._patience < math.inf:
                raise _ParentError("it has only a part of the version, and nothing new for some time")
            if await self._is_behind(parent, len(theirs.entries)):
                raise _ParentError("it has had nothing new for some time, although the store has")
        if len(theirs.shards) != len(self._copy.index.shards):
            raise _ContradictionError(f"{parent} has {len(theirs.shards)} shards, but {len(self._copy.index.shards)} were announced before")

    def _take_entry(self, parent: str, theirs: Index, entry: IndexEntry, wanted: asyncio.Queue[Piece]) -> None:
        if entry.shard is not None:
            self._take_shard(parent, len(theirs.shards) - 1, entry)
        elif entry.piece is not None:
            known = self._copy.index.digests.get((entry.piece.shard, entry.piece.piece))
            if known is None:
                wanted.put_nowait(entry.piece)
            elif known != entry.piece.digest:
                where = f"piece {entry.piece.piece} of shard {entry.piece.shard}"
                raise _ContradictionError(f"{parent} has other bytes in {where} than the parent before")
        elif theirs.end is not None and self._request.digest not in ("", theirs.end.digest):
            message = f"its version has digest {theirs.end.digest[:12]}…, not {self._request.digest[:12]}…"
            raise _ParentError(message, is_wrong=True)

    def _take_shard(self, parent: str, number: int, entry: IndexEntry) -> None:
        mine = self._copy.index.shards
        if number < len(mine):
            if mine[number] != entry.shard:
                raise _ContradictionError(f"{parent} has other tensors in shard {number} than the parent before")
            return
        try:
            if entry.shard is not None:
                self._copy.add_shard(entry.shard)
        except StagedError as error:
            if error.fault is StagedFault.DELETED or parent == self._parents[-1]:
                raise
            # The store will say whether the version is so large.
            raise _ParentError(f"its shard {number} cannot be taken: {error}", is_wrong=True) from error

    async def _read_entries(self, parent: str, position: int) -> IndexReply:
        """Return the entries from a position on; none after some seconds without one."""
        patient_until = asyncio.get_running_loop().time() + PATIENCE_SECONDS
        while True:
            try:
                # The first question does not wait for an entry, because a parent that hangs is noticed sooner so.
                if not position and (first := await self._ask_index(parent, position, 0)).entries:
                    return first
                return await self._ask_index(parent, position, POLL_SECONDS)
            except _AbsentError as error:
                if position or asyncio.get_running_loop().time() >= patient_until:
                    raise _ParentError(str(error)) from None
                await asyncio.sleep(_PATIENCE_STEP_SECONDS)

    async def _ask_index(self, parent: str, position: int, wait: float) -> IndexReply:
        url, query = f"{parent}{STAGED}/{self._copy.update}/index", {"from": str(position), "wait": f"{wait:g}"}
        limit = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=wait + self._silence_seconds)
        try:
            async with self._session.get(url, params=query, headers=self._headers(), timeout=limit, allow_redirects=False) as answer:
                await _check_status(answer)
                return IndexReply.model_validate_json(await _read(answer))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _ParentError(_describe_failure(error, wait + self._silence_seconds)) from error
        except ValidationError as error:
            raise _ParentError(f"its index is malformed: {str(error).splitlines()[0]}", is_wrong=True) from error

    async def _is_behind(self, parent: str, position: int) -> bool:
        """Return whether the store has entries that the parent does not have."""
        store = self._parents[-1]
        if parent == store:
            return False
        try:
            return bool((await self._ask_index(store, position, 0)).entries)
        except (_ParentError, _AbsentError):
            return False

    # The pieces

    async def _fetch_pieces(self, reader: PieceReader, wanted: asyncio.Queue[Piece]) -> None:
        while True:
            await self._fetch_piece(reader, await wanted.get())
            wanted.task_done()

    async def _fetch_piece(self, reader: PieceReader, piece: Piece) -> None:
        origin = self._find_origin(piece)
        if origin is not None:
            try:
                return await self._fill_piece(reader, piece, origin)
            except StagedError as error:
                if error.fault not in (StagedFault.WRONG_BYTES, StagedFault.INCOMPLETE):
                    raise
                where = f"piece {piece.piece} of shard {piece.shard} of update {self._copy.update}"
                log.warning("The version before does not help with %s, so the whole piece is copied: %s", where, error)
        try:
            await self._fill_piece(reader, piece, None)
        except StagedError as error:
            if error.fault is StagedFault.WRONG_BYTES:
                raise _ParentError(str(error), is_wrong=True) from error
            raise

    async def _fill_piece(self, reader: PieceReader, piece: Piece, origin: Origin | None) -> None:
        """Copy a piece: whole, or as its difference from the piece ``origin``. An equal piece is copied from there."""
        url, base = f"{STAGED}/{self._copy.update}/pieces/{piece.shard}/{piece.piece}", self._base
        if origin is not None and base is not None and base.index.digests[piece.shard, piece.piece] == piece.digest:
            await self._copy.patch_piece(piece.shard, piece.piece, piece.digest, base, b"")
            return

        async def write(file: Path, offset: int, size: int) -> str:
            received = await reader.read(url, Target(file, offset, size, self._copy.note_bytes), origin)
            self._copy.transferred += size if received.difference is None else len(received.difference)
            if received.difference is not None and base is not None and received.digest == piece.digest:
                await self._copy.keep_difference(base, piece.shard, piece.piece, received.difference)
            return received.digest

        try:
            if await self._copy.fill_piece(piece.shard, piece.piece, piece.digest, write):
                size = self._copy.piece_location(piece.shard, piece.piece)[2]
                self._bytes_from[reader.parent] = self._bytes_from.get(reader.parent, 0) + size
        except RefusedPieceError as error:
            raise _ParentError(_describe_refusal(url, error.status, error.code, str(error))) from None
        except BrokenAnswerError as error:
            raise _ParentError(str(error)) from error

    def _find_origin(self, piece: Piece) -> Origin | None:
        """Return the same piece of the other version; None if the other version is gone, or has no piece of this size there."""
        base, place = self._base, (piece.shard, piece.piece)
        if base is None or base.is_deleted or base.index.end is None or place not in base.index.digests:
            return None
        if base.index.piece_size(*place) != self._copy.index.piece_size(*place):
            return None
        path, offset, _ = base.piece_location(*place)
        return Origin(base.index.end.digest, path, offset)

    def _headers(self) -> dict[str, str]:
        return {TICKET_HEADER: self._request.ticket, "Accept-Encoding": "identity"}


async def _chunks(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield a body as it arrives, without joining what the parser has split."""
    async for chunk, _ in content.iter_chunks():
        yield chunk


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    parts, size = [], 0
    async for part in _chunks(answer.content):
        size += len(part)
        if size > _MAX_REPLY_BYTES:
            raise _ParentError(f"its answer has more than {_MAX_REPLY_BYTES} bytes", is_wrong=True)
        parts.append(part)
    return b"".join(parts)


async def _check_status(answer: aiohttp.ClientResponse) -> None:
    if answer.status == 200:
        return
    code, message = "", answer.reason or ""
    try:
        body = await read_json(answer, ERROR_BYTES)
        code, message = str(body["code"]), str(body["message"])
    except (ValueError, TypeError, KeyError, AnswerTooLargeError):
        pass  # not an answer of this project: status and reason describe it
    described = _describe_refusal(answer.url.path, answer.status, code, message)
    raise _AbsentError(described) if _is_absent(answer.status, code) else _ParentError(described)


def _is_absent(status: int, code: str) -> bool:
    return status == 404 and code == RefusalCode.NOT_FOUND


def _describe_refusal(path: str, status: int, code: str, message: str) -> str:
    return "it does not have the update" if _is_absent(status, code) else f"it answered {status} to GET {path}: {quote_value(message)}"


def _describe_failure(error: Exception, seconds: float) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return describe_unreachable(error.os_error)
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return describe_unreachable(None)
    if isinstance(error, TimeoutError):
        return describe_silence(seconds)
    return f"the answer broke off ({type(error).__name__}: {error})"


def _first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that decides most: of the copy, a contradiction, wrong bytes, of the parent."""

    def rank(error: BaseException) -> int:
        order = (StagedError, _ContradictionError, _ParentError)
        place = next((number for number, kind in enumerate(order) if isinstance(error, kind)), -1)
        return place + (isinstance(error, _ParentError) and not error.is_wrong)

    return min(errors.exceptions, key=rank)


def _raise_if_cancelled() -> None:
    """Raise CancelledError if a cancellation met an error of a task group, which reports the error alone before Python 3.13."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
