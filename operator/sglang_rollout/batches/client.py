"""HTTP client of the batch server: requests to smg and to engines."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Self

import aiohttp

from sglang_rollout.bounded import open_connector, open_session

MAX_BATCH_PROMPTS = 1024
"""Prompts of all batches that are sent at a time. Each takes a connection to smg, and another from smg to a gate.

Other requests have no limit here, so that they never wait for a batch: the front limits the number of requests to the batch server.
"""
HOLD_SECONDS = 60.0
"""Longest wait of a request while smg restarts or no engine serves; the same as in the front and in smg."""
NO_ENGINE = (
    "No engine serves this request now: none holds the weights that the fleet has committed, or the router is restarting. "
    "GET /fleet shows the state of each engine. Try again."
)
_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 0.5
_KEEPALIVE_SECONDS = 25.0
"""Shorter than smg's 90 s, so that smg never closes a connection that is about to be used."""


class UnreachableError(Exception):
    """Nothing accepted the request within the longest wait."""


class ConnectionLostError(Exception):
    """The connection ended before the answer."""


class GenerateClient:
    """Forwards data requests. Use as an async context manager."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        """Base URL of smg."""
        self.turns = itertools.count()
        """Round-robin counter for requests that go to an engine directly."""
        self.batch_prompts = asyncio.Semaphore(MAX_BATCH_PROMPTS)
        """Entered while a prompt of a batch is sent and answered. Prompts of all batches wait in one queue."""
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = open_connector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        self._session = open_session(connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, url: str, data: bytes, headers: Mapping[str, str], *, hold: float = 0.0) -> aiohttp.ClientResponse:
        """Send a request and return the answer, whose body is not read yet.

        Retry for ``hold`` seconds while no connection can be opened, because then the request was never sent.

        Raises:
            UnreachableError: Nothing accepted the request.
            ConnectionLostError: The connection broke before the answer.
        """
        if self._session is None:
            raise RuntimeError("GenerateClient is used outside its 'async with' block")
        loop = asyncio.get_running_loop()
        end = loop.time() + hold
        while True:
            try:
                return await self._session.post(url, data=data, headers=headers)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                if loop.time() >= end:
                    raise UnreachableError(NO_ENGINE) from error
                await asyncio.sleep(_RETRY_SECONDS)
            except (aiohttp.ClientError, OSError) as error:
                raise ConnectionLostError(f"The connection to {url} broke before the answer ({type(error).__name__}).") from None
