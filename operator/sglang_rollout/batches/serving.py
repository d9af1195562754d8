"""The coordinator's view of the fleet, as the batch server knows it."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Self

import aiohttp
from pydantic import ValidationError

from sglang_rollout.bounded import MESSAGE_BYTES, open_session, read_answer
from sglang_rollout.wire.ports import FLEET_SERVING
from sglang_rollout.wire.serving import Serving

log = logging.getLogger(__name__)

MAX_AGE_SECONDS = 0.25
"""Age at which the view is read again. The gate of each engine refuses a request that an older view sends there."""
_READ_SECONDS = 1.0


class ServingView:
    """Reads ``GET /fleet/serving`` when a request needs it. Use as an async context manager.

    While the coordinator does not answer, the last view stays in effect, so batches continue.
    """

    def __init__(self, coordinator: str) -> None:
        self._url = coordinator.rstrip("/") + FLEET_SERVING
        self._session: aiohttp.ClientSession | None = None
        self._serving = Serving()
        self._read_at = -math.inf
        self._reading = asyncio.Lock()
        self._last_problem = ""

    async def __aenter__(self) -> Self:
        self._session = open_session(timeout=aiohttp.ClientTimeout(total=_READ_SECONDS))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def read(self, *, max_age: float = MAX_AGE_SECONDS) -> Serving:
        """Return a view that was read at most ``max_age`` seconds before this call, if the coordinator answers."""
        wanted = asyncio.get_running_loop().time() - max_age
        async with self._reading:  # requests that arrive together share one call
            if self._read_at < wanted:
                await self._read_again()
        return self._serving

    async def _read_again(self) -> None:
        if self._session is None:
            raise RuntimeError("ServingView is used outside its 'async with' block")
        problem, began = "", asyncio.get_running_loop().time()
        try:
            async with self._session.get(self._url) as reply:
                reply.raise_for_status()
                self._serving = Serving.model_validate_json(await read_answer(reply, MESSAGE_BYTES))
        except (TimeoutError, aiohttp.ClientError, OSError, ValidationError) as error:
            problem = str(error) or type(error).__name__
            began = asyncio.get_running_loop().time()
        self._read_at = began
        if problem != self._last_problem:
            self._last_problem = problem
            if problem:
                log.warning("the coordinator does not answer: %s", problem)
            else:
                log.info("the coordinator answers again")
