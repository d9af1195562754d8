"""HTTP client of smg and of the engines' gates for data requests. It waits while nothing listens and sets no limit on an answer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Self

import aiohttp

MAX_CONNECTIONS = 1024
"""Requests of all batches at once; further requests wait here. Each takes a connection to smg and one from smg to a gate."""
HOLD_SECONDS = 60.0
"""Longest wait of a request while smg restarts or no engine serves; the same as in the front and in smg."""
_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 0.5
_KEEPALIVE_SECONDS = 25.0
"""Shorter than smg's 90 s, so that no connection is used that smg is about to close."""


class UnreachableError(Exception):
    """Nothing accepted the request within the longest wait."""


class ConnectionLostError(Exception):
    """The connection ended before the answer."""


class GenerateClient:
    """Forwards data requests. Use as an async context manager."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.turns = itertools.count()
        """Round-robin counter for requests that go to an engine directly."""
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=_KEEPALIVE_SECONDS)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        # An answer is forwarded as it came, so it is not decompressed here.
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def post(self, path: str, data: bytes, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield smg's answer. Retry only while nothing listens, because then the request was never sent."""
        async with self._open(self.url + path, data, headers, HOLD_SECONDS) as reply:
            yield reply

    @asynccontextmanager
    async def post_to(self, url: str, data: bytes, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the answer of one engine's gate, without a retry."""
        async with self._open(url, data, headers, 0.0) as reply:
            yield reply

    @asynccontextmanager
    async def _open(self, url: str, data: bytes, headers: Mapping[str, str], hold: float) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            raise RuntimeError("GenerateClient is used outside its 'async with' block")
        loop = asyncio.get_running_loop()
        end = loop.time() + hold
        while True:
            try:
                reply = await self._session.post(url, data=data, headers=headers)
                break
            except aiohttp.ClientConnectorError as error:
                if loop.time() >= end:
                    raise UnreachableError(f"Nothing listens at {url}: {error.os_error.strerror or error.os_error}.") from None
                await asyncio.sleep(_RETRY_SECONDS)
            except (aiohttp.ClientError, OSError) as error:
                raise ConnectionLostError(f"The connection to {url} broke before the answer ({type(error).__name__}).") from None
        async with reply:
            yield reply
