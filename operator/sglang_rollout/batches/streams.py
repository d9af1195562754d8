"""Streamed answers to batches: the events of all items in one stream, as SGLang sends them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from sglang_rollout.batches.aborted import AbortedError, make_samples
from sglang_rollout.batches.client import ConnectionLostError
from sglang_rollout.batches.split import add_index, encode
from sglang_rollout.json_text import load_json
from sglang_rollout.wire.errors import read_error
from sglang_rollout.wire.ports import VERSION_HEADER

_WAITING_EVENTS = 256
"""Limit of buffered events: a slow reader slows the engines' streams and does not fill the memory."""
_KEEPALIVE_SECONDS = 15.0
_DONE = b"[DONE]"
_QUOTED_BYTES = 2000
"""Most bytes of a refusal in plain text that are quoted."""
_TEMPORARY = (408, 429)
"""Statuses below 500 after which a retry may help."""


class ItemError(Exception):
    """An item of a batch failed; the whole batch gets the same answer."""

    def __init__(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.body = body
        self.headers = headers

    @property
    def message(self) -> str:
        """Message of the answer, where the plug-in's code comes first; the status if the answer has none. smg refuses with plain text."""
        if self.headers.get("Content-Type", "").startswith("text/plain"):
            return self.body[:_QUOTED_BYTES].decode(errors="replace").strip() or str(self)
        try:
            found = read_error(load_json(self.body))
        except (ValueError, AttributeError):
            found = None
        return str(self) if found is None else str(found)


Send = Callable[[int], AbstractAsyncContextManager[aiohttp.ClientResponse]]
"""Sends the item of a batch with this number and yields the answer."""


class BatchStream:
    """The streamed answer to one batch. A failure before the first event is raised, so that it gets its own HTTP status."""

    def __init__(self, request: web.Request, size: int, samples: int, send: Send, most_running: int) -> None:
        self._request = request
        self._size = size
        self._samples = samples
        self._send_item = send
        self._most_running = most_running
        self._events: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue(_WAITING_EVENTS)
        self._versions: dict[str, None] = {}
        self._answer: web.StreamResponse | None = None

    async def run(self) -> web.StreamResponse:
        """Forward events until all items have ended, an item has failed, or the client has disconnected."""
        async with run_bounded(self._size, self._follow, self._most_running):
            return await self._write(self._size)

    async def _follow(self, place: int) -> None:
        try:
            async with self._send_item(place) as reply:
                version = reply.headers.get(VERSION_HEADER)
                if version:
                    self._versions[version] = None
                async for event in read_events(reply):
                    if event == _DONE:
                        await self._events.put(None)
                        return
                    await self._events.put(add_index(event, place, self._samples))
                raise ConnectionLostError("The engine ended a stream before its end.")
        except AbortedError as error:
            self._versions[error.weight_version] = None
            for number, sample in enumerate(make_samples(error)):
                await self._events.put(encode({**sample, "index": place * self._samples + number}))
            await self._events.put(None)
        except (aiohttp.ClientError, OSError) as error:
            await self._events.put(
                ConnectionLostError(f"The engine broke the connection in the middle of a stream ({type(error).__name__}).")
            )
        except Exception as error:  # noqa: BLE001 - the writer sends it to the client
            await self._events.put(error)

    async def _write(self, running: int) -> web.StreamResponse:
        while running:
            event = await self._next()
            if event is None:
                running -= 1
            elif isinstance(event, BaseException):
                return await self._write_failure(event)
            else:
                await self._send(b"data: " + event + b"\n\n")
                if b'"error"' in event and "error" in load_json(event):
                    break  # SGLang refused one item, which ends its batch too
        await self._send(b"data: " + _DONE + b"\n\n")
        return await self._finish()

    async def _next(self) -> bytes | BaseException | None:
        while True:
            try:
                async with asyncio.timeout(_KEEPALIVE_SECONDS):
                    return await self._events.get()
            except TimeoutError:
                await self._send(b": waiting\n\n")

    async def _write_failure(self, error: BaseException) -> web.StreamResponse:
        if self._answer is None:
            raise error
        status, message = (error.status, error.message) if isinstance(error, ItemError) else (502, str(error))
        is_refused = status < 500 and status not in _TEMPORARY
        kind = "invalid_request_error" if is_refused else "server_error"
        failure: dict[str, Any] = {"error": {"message": message, "type": kind, "code": status, "retryable": not is_refused}}
        await self._send(b"data: " + json.dumps(failure).encode() + b"\n\n")
        if is_refused:  # as SGLang. Else no [DONE]: clients recognize an incomplete stream by its absence.
            await self._send(b"data: " + _DONE + b"\n\n")
        return await self._finish()

    async def _send(self, data: bytes) -> None:
        if self._answer is None:
            headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
            if self._versions:
                headers[VERSION_HEADER] = ", ".join(self._versions)
            self._answer = web.StreamResponse(headers=headers)
            await self._answer.prepare(self._request)
        await self._answer.write(data)

    async def _finish(self) -> web.StreamResponse:
        if self._answer is None:
            raise RuntimeError("nothing was sent")
        await self._answer.write_eof()
        return self._answer


@asynccontextmanager
async def run_bounded(
    number: int, run: Callable[[int], Coroutine[Any, Any, None]], most_running: int
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Call ``run`` with 0 to ``number`` - 1, at most ``most_running`` at a time, and yield the tasks.

    They are cancelled at the end of the block, so that a batch ends when its client has gone.
    """
    places = iter(range(number))

    async def work() -> None:
        for place in places:  # all tasks share the iterator
            await run(place)

    tasks = [asyncio.create_task(work()) for _ in range(min(number, most_running))]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def read_events(reply: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event. With logprobs a line may exceed aiohttp's limit for lines."""
    held = bytearray()
    async for chunk in reply.content.iter_any():
        held += chunk
        *lines, rest = held.split(b"\n")
        held = bytearray(rest)
        for line in lines:
            if line.startswith(b"data:"):
                yield bytes(line[5:].strip())
