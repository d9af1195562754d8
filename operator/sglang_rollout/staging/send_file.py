"""Answer a request with a part of a file: the kernel copies the bytes from the file to the connection.

``loop.sendfile`` would do it, but uvloop does not have it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping
from typing import IO

from aiohttp import web

from sglang_rollout.staging.files import BATCH_BYTES
from sglang_rollout.staging.index import StagedError

STALL_SECONDS = 30.0
"""Time without a byte after which a reader is given up."""
_FLUSH_CHECK_SECONDS = 0.002


async def send_file(
    request: web.Request, file: IO[bytes], offset: int, size: int, headers: Mapping[str, str] | None = None
) -> web.StreamResponse:
    """Answer with ``size`` bytes of a file from ``offset`` on, and with these headers.

    Raises:
        ConnectionResetError: The reader is gone or has stalled, or the file is too short; the connection is closed.
    """
    response = web.StreamResponse(headers={"Content-Type": "application/octet-stream", **(headers or {})})
    response.content_length = size
    await response.prepare(request)
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the reader has closed the connection")
    try:
        await _flush(transport)
        # The number of the transport's own socket may belong to another connection once the transport is closed.
        with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as connection:
            await _send(connection, file, offset, size)
    except (OSError, TimeoutError) as error:
        transport.abort()  # the answer cannot be completed, and the reader must see that
        raise ConnectionResetError(f"{request.path}: the answer broke off: {error}") from error
    except asyncio.CancelledError:
        transport.abort()
        raise
    await response.write_eof()
    return response


async def send_bytes(request: web.Request, parts: AsyncIterator[bytes], size: int) -> web.StreamResponse:
    """Answer with ``size`` bytes that ``parts`` yields. What the first part raises is raised before the answer begins.

    Raises:
        ConnectionResetError: The reader is gone or has stalled, or the bytes cannot be read to their end; the connection is closed.
    """
    part = await anext(parts, b"")
    response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
    response.content_length = size
    await response.prepare(request)
    transport = request.transport
    sent = 0
    try:
        while part:
            async with asyncio.timeout(STALL_SECONDS):
                await response.write(part)
            sent += len(part)
            part = await anext(parts, b"")
        if sent != size:
            raise ConnectionResetError("the file is too short")
    except (OSError, TimeoutError, StagedError) as error:
        if transport is not None:
            transport.abort()  # the answer cannot be completed, and the reader must see that
        raise ConnectionResetError(f"{request.path}: the answer broke off: {error}") from error
    await response.write_eof()
    return response


async def _flush(transport: asyncio.Transport) -> None:
    """Wait until the headers have left the transport's own buffer."""
    async with asyncio.timeout(STALL_SECONDS):
        await asyncio.sleep(0)
        while transport.get_write_buffer_size():
            if transport.is_closing():
                raise ConnectionResetError("the reader has closed the connection")
            await asyncio.sleep(_FLUSH_CHECK_SECONDS)


async def _send(connection: socket.socket, file: IO[bytes], offset: int, size: int) -> None:
    """Send the bytes in parts: a piece on a disk may have to be read first, which blocks all other requests."""
    end = offset + size
    while offset < end:
        try:
            count = os.sendfile(connection.fileno(), file.fileno(), offset, min(BATCH_BYTES, end - offset))
        except BlockingIOError:
            await _wait_writable(connection)
            continue
        if not count:
            raise ConnectionResetError("the file is too short")
        offset += count
        await asyncio.sleep(0)  # other requests have their turn


async def _wait_writable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    writable = loop.create_future()

    def wake() -> None:
        if not writable.done():
            writable.set_result(None)

    loop.add_writer(connection.fileno(), wake)
    try:
        async with asyncio.timeout(STALL_SECONDS):
            await writable
    finally:
        loop.remove_writer(connection.fileno())
