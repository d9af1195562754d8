"""Client of smg and of the engines' gates for requests that generate: streams, patience while nobody listens, no time-out of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Self

import aiohttp

MOST_AT_ONCE = 1024
"""Requests under way for all batches together; further ones wait here. Each costs a connection to smg and one from smg to a gate."""
HOLD_SECONDS = 60.0
"""So long a request waits while smg restarts or no engine serves; as long as the front and smg themselves."""
_CONNECT_SECONDS = 5.0
_AGAIN_SECONDS = 0.5
_KEPT_SECONDS = 25.0
"""Under smg's own 90 s: a connection that the other side is about to close is never used."""


class NobodyAnswersError(Exception):
    """Nothing took the request, for as long as it may wait; the message is a sentence."""


class BrokeOffError(Exception):
    """The connection ended before the answer; the message is a sentence."""


class Smg:
    """Sends requests on. Use as an async context manager."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.turns = itertools.count()
        """For those who choose an engine themselves."""
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=MOST_AT_ONCE, keepalive_timeout=_KEPT_SECONDS)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        # An answer is passed on as it came, so it is not unpacked here.
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def post(self, path: str, data: bytes, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer of smg. Tried again only while nothing listens: then the request was never sent."""
        async with self._open(self.url + path, data, headers, HOLD_SECONDS) as reply:
            yield reply

    @asynccontextmanager
    async def post_to(self, url: str, data: bytes, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer of one engine's gate, asked once."""
        async with self._open(url, data, headers, 0.0) as reply:
            yield reply

    @asynccontextmanager
    async def _open(self, url: str, data: bytes, headers: Mapping[str, str], patience: float) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            raise RuntimeError("Smg is used outside its 'async with' block")
        loop = asyncio.get_running_loop()
        end = loop.time() + patience
        while True:
            try:
                reply = await self._session.post(url, data=data, headers=headers)
                break
            except aiohttp.ClientConnectorError as error:
                if loop.time() >= end:
                    raise NobodyAnswersError(f"Nothing listens at {url}: {error.os_error.strerror or error.os_error}.") from None
                await asyncio.sleep(_AGAIN_SECONDS)
            except (aiohttp.ClientError, OSError) as error:
                raise BrokeOffError(f"The connection to {url} broke before the answer ({type(error).__name__}).") from None
        async with reply:
            yield reply
