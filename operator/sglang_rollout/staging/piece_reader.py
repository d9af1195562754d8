"""Read pieces from one parent straight into their files, in threads.

A thread receives into one buffer, hashes it and writes it, and holds the interpreter's lock in none of these calls. On an event loop the
same bytes pass through many small buffers, which costs half as much processor time again and keeps one core busy. Only the application of
a difference holds the lock, block by block.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

from sglang_rollout.json_text import load_json
from sglang_rollout.staging.differences import most_bytes
from sglang_rollout.staging.files import BATCH_BYTES, Writing, finish_in_thread, patch_range
from sglang_rollout.staging.index import StagedError, StagedFault
from sglang_rollout.wire.ports import BASE_HEADER

_MAX_REFUSAL_BYTES = 2**16
"""Bytes of a refusal that are read."""


def describe_silence(seconds: float) -> str:
    """Return that a parent has sent nothing, as a clause."""
    return f"it has sent nothing for {seconds:g} s"


def describe_unreachable(error: OSError | None) -> str:
    """Return that no connection to a parent opens, as a clause. None: nothing answers. asyncio's text repeats the address."""
    if error is None:
        return "it cannot be reached (no answer)"
    number = error.errno or 0  # that of a name that is not resolved is negative
    return f"it cannot be reached ({os.strerror(number) if number > 0 else error})"


class RefusedPieceError(Exception):
    """The parent has answered with another status than 200."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class BrokenAnswerError(Exception):
    """The connection or the answer broke off. ``str()`` says how, without the name of the parent."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the bytes of a piece belong."""

    file: Path
    offset: int
    size: int
    on_bytes: Callable[[int], None] = lambda _count: None
    """Called in the thread with the number of bytes that have arrived since the last call."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The same piece of another version, which this pod has."""

    version: str
    """Digest of the other version."""
    file: Path
    offset: int


@dataclass(frozen=True, slots=True)
class Received:
    """A piece that was written."""

    digest: str
    """SHA-256 of the whole piece."""
    difference: bytes | None = None
    """What was sent in place of the piece; None: the piece itself."""


class PieceReader:
    """Connections to one parent. Close it after the last piece.

    Args:
        parent: URL of the parent's data port.
        headers: Headers of each request.
        parallel: Most pieces at a time.
        connect_seconds: Timeout of a connection.
        read_seconds: Time without a byte after which the answer has broken off.
    """

    def __init__(
        self,
        parent: str,
        headers: Mapping[str, str],
        *,
        parallel: int,
        connect_seconds: float,
        read_seconds: float,
    ) -> None:
        self.parent = parent
        parts = urlsplit(parent)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._headers = dict(headers)
        self._connect_seconds = connect_seconds
        self._read_seconds = read_seconds
        self._idle: list[HTTPConnection] = []
        self._threads = ThreadPoolExecutor(parallel, thread_name_prefix="pieces")

    async def read(self, path: str, target: Target, origin: Origin | None = None) -> Received:
        """Write the bytes of a piece to their file. A cancelled call has ended its thread when it raises.

        Args:
            path: Path of the request.
            target: The file.
            origin: With it, the parent may answer with the difference.

        Raises:
            RefusedPieceError: The parent refuses.
            BrokenAnswerError: The parent cannot be reached, or the answer breaks off.
            StagedError: The answer has another number of bytes, the difference is damaged, or a file cannot be read or written.
        """
        while True:
            is_used = bool(self._idle)
            connection = self._idle.pop() if is_used else await self._connect()
            try:
                found = await finish_in_thread(
                    partial(self._read, connection, path, target, origin),
                    executor=self._threads,
                    on_cancel=partial(_shut_down, connection),
                )
            except _UnansweredError as error:
                connection.close()
                if not is_used:  # the parent closes a connection that was idle for long; another one is tried then
                    raise BrokenAnswerError(str(error)) from None
            except BaseException:
                connection.close()
                raise
            else:
                self._idle.append(connection)
                return found

    def close(self) -> None:
        """Close all connections. No call may be in progress."""
        for connection in self._idle:
            connection.close()
        self._threads.shutdown(wait=False)

    async def _connect(self) -> HTTPConnection:
        """Return a new connection. The event loop opens it, because a thread could not be interrupted meanwhile."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_seconds):
                for family, kind, protocol, _, address in await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM):
                    connected = socket.socket(family, kind, protocol)
                    try:
                        connected.setblocking(False)
                        await loop.sock_connect(connected, address)
                        break
                    except OSError as error:
                        connected.close()
                        problem = error
                    except BaseException:
                        connected.close()
                        raise
                else:
                    raise problem
        except TimeoutError:
            raise BrokenAnswerError(describe_unreachable(None)) from None
        except OSError as error:
            raise BrokenAnswerError(describe_unreachable(error)) from error
        connected.settimeout(self._read_seconds)
        connection = HTTPConnection(self._host, self._port, timeout=self._read_seconds)
        connection.sock = connected
        return connection

    def _read(self, connection: HTTPConnection, path: str, target: Target, origin: Origin | None) -> Received:
        """Send a request, and write the piece that its answer holds. Runs in a thread."""
        asked = {} if origin is None else {BASE_HEADER: origin.version}
        try:
            connection.request("GET", path, headers={**self._headers, **asked})
            answer = connection.getresponse()
        except TimeoutError:
            raise BrokenAnswerError(describe_silence(self._read_seconds)) from None
        except (OSError, HTTPException) as error:
            raise _UnansweredError(f"the answer broke off ({type(error).__name__}: {error})") from error
        try:
            if answer.status != 200:
                raise _refusal(answer)
            return _receive_piece(target, origin, answer)
        except TimeoutError:
            raise BrokenAnswerError(describe_silence(self._read_seconds)) from None
        except (OSError, HTTPException) as error:
            raise BrokenAnswerError(f"the answer broke off ({type(error).__name__}: {error})") from error


class _UnansweredError(Exception):
    """The connection broke off before the first byte of an answer."""


def _shut_down(connection: HTTPConnection) -> None:
    """End the thread that uses a connection: its wait ends, and its next call fails."""
    used = connection.sock
    if used is not None:
        with suppress(OSError):  # the parent has closed it
            used.shutdown(socket.SHUT_RDWR)


def _receive_piece(target: Target, origin: Origin | None, answer: HTTPResponse) -> Received:
    """Write the piece that an answer holds, or the one that follows from its difference."""
    if (version := answer.getheader(BASE_HEADER)) is not None:
        return _receive_difference(answer, target, origin, version)
    return Received(_receive(answer, target))


def _receive(answer: HTTPResponse, target: Target) -> str:
    """Write an answer to its file in parts, and return the SHA-256."""
    if answer.length not in (None, target.size):
        raise _wrong_size(target.size, str(answer.length))
    buffer, hashed, received = memoryview(bytearray(min(BATCH_BYTES, max(1, target.size)))), hashlib.sha256(), 0
    with Writing(target.file):
        file = target.file.open("r+b", buffering=0)
    with file:
        while received < target.size:
            count = answer.readinto(buffer[: target.size - received])
            if not count:
                if answer.length is None:
                    raise _wrong_size(target.size, str(received))
                raise ConnectionResetError(f"{received} of {target.size} bytes have arrived")
            part = buffer[:count]
            hashed.update(part)
            _write(file.fileno(), part, target, received)
            received += count
            target.on_bytes(count)
    if answer.readinto(buffer[:1]):
        raise _wrong_size(target.size, "more")
    return hashed.hexdigest()


def _receive_difference(answer: HTTPResponse, target: Target, origin: Origin | None, version: str) -> Received:
    """Write the piece that follows from a difference."""
    if origin is None or version != origin.version:
        raise StagedError(f"A difference from version {version[:12]}… arrived, which was not asked for.", StagedFault.WRONG_BYTES)
    limit = most_bytes(target.size)
    difference, room = bytearray(), limit + 1
    while room and (part := answer.read(min(BATCH_BYTES, room if answer.length is None else min(room, answer.length)))):
        difference += part
        room -= len(part)
        target.on_bytes(len(part))
    if len(difference) > limit:
        raise StagedError(f"A difference of more than {limit} bytes arrived for a piece of {target.size}.", StagedFault.WRONG_BYTES)
    if answer.length:
        raise ConnectionResetError(f"{len(difference)} of {len(difference) + answer.length} bytes have arrived")
    whole = bytes(difference)
    return Received(patch_range(origin.file, origin.offset, target.file, target.offset, target.size, difference=whole), whole)


def _write(descriptor: int, part: memoryview, target: Target, position: int) -> None:
    with Writing(target.file):
        while part:
            count = os.pwrite(descriptor, part, target.offset + position)
            part, position = part[count:], position + count


def _wrong_size(size: int, found: str) -> StagedError:
    return StagedError(f"A piece of {size} bytes arrived with {found} bytes.", StagedFault.WRONG_BYTES)


def _refusal(answer: HTTPResponse) -> RefusedPieceError:
    """Return the error for an answer with another status than 200; without a code if it is not of this project."""
    code, message, text = "", answer.reason, answer.read(_MAX_REFUSAL_BYTES)
    with suppress(ValueError, TypeError, KeyError):
        body = load_json(text)
        code, message = str(body["code"]), str(body["message"])
    return RefusedPieceError(answer.status, code, message)
