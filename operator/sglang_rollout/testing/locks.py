"""SGLang's lock between generation and updates: many requests, or one update."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class RequestsOrUpdate:
    """Readers are requests, writers are updates; a waiting writer holds up new readers."""

    def __init__(self) -> None:
        self._condition = asyncio.Condition()
        self.readers = 0
        self._writing = False
        self._waiting = 0

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[None]:
        """For as long as a request runs."""
        async with self._condition:
            await self._condition.wait_for(lambda: not self._writing and not self._waiting)
            self.readers += 1
        try:
            yield
        finally:
            async with self._condition:
                self.readers -= 1
                self._condition.notify_all()

    @asynccontextmanager
    async def writer(self) -> AsyncIterator[None]:
        """For an update of an engine that is not paused: begins when the last running request has ended."""
        async with self._condition:
            self._waiting += 1
            try:
                await self._condition.wait_for(lambda: not self._writing and not self.readers)
            finally:
                self._waiting -= 1
            self._writing = True
        try:
            yield
        finally:
            async with self._condition:
                self._writing = False
                self._condition.notify_all()
