"""A work queue with client-go's semantics: no key is processed twice at once.

::

                 add                      get                     done
    (nowhere) ─────────► queued ─────────────────► processing ───────────► (nowhere)
                          ▲  │ add: nothing            │ add: dirty
                          └──┘                         └────── done while dirty ──► queued

A key is in at most one of *queued* and *processing*. So each key has one worker at a time, and a burst of events costs one reconcile.
If events arrive during that reconcile, a second one follows, because the first may have read older objects.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

# client-go's defaults are 5 ms and 1000 s. A retry within 100 ms of a refusal is useless, and a delay above a minute would leave a fleet
# unattended after a long outage.
FIRST_DELAY_SECONDS = 0.1
LAST_DELAY_SECONDS = 60.0
# The operator's own writes return as a burst of events. This delay turns them into one more reconcile instead of five, and limits
# the rate of a fight with another writer of the same fields.
SETTLE_SECONDS = 0.1


class WorkQueue(Generic[Key]):
    """Keys that wait for a worker. Use it from one event loop only."""

    def __init__(
        self,
        *,
        first_delay: float = FIRST_DELAY_SECONDS,
        last_delay: float = LAST_DELAY_SECONDS,
        settle: float = SETTLE_SECONDS,
        jitter: Callable[[], float] = lambda: random.uniform(0.8, 1.2),  # noqa: S311 - no secret
    ) -> None:
        self._first_delay = first_delay
        self._last_delay = last_delay
        self._settle = settle
        self._jitter = jitter
        self._ready: deque[Key] = deque()
        self._queued: set[Key] = set()
        self._processing: set[Key] = set()
        self._dirty: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, key: Key) -> None:
        """Queue ``key`` for the next free worker."""
        self._cancel_timer(key)
        if key in self._processing:
            self._dirty.add(key)
        elif key not in self._queued:
            self._queued.add(key)
            self._ready.append(key)
            self._wake.set()

    def add_after(self, key: Key, delay: float) -> None:
        """Queue ``key`` in ``delay`` seconds. Of several such requests, the earliest counts."""
        loop = asyncio.get_running_loop()
        waiting = self._timers.get(key)
        if waiting is not None:
            if waiting.when() <= loop.time() + delay:
                return
            waiting.cancel()
        self._timers[key] = loop.call_later(delay, self._add_due, key)

    def retry(self, key: Key, *, at_least: float = 0.0, at_most: float | None = None) -> float:
        """Queue ``key`` after a delay that doubles with each failure, within the limits given. Return the delay."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        # The exponent is bounded first, because 2**1100 does not fit a float.
        exponential = self._first_delay * float(2 ** min(failures, 30))
        limit = self._last_delay if at_most is None else at_most
        delay = max(min(exponential, limit) * self._jitter(), at_least)
        self.add_after(key, delay)
        return delay

    def forget(self, key: Key) -> None:
        """Reset the failures of ``key`` after a success, so that the next failure starts with the short delay."""
        self._failures.pop(key, None)

    def count_failures(self, key: Key) -> int:
        """Return the number of failures of ``key`` in a row."""
        return self._failures.get(key, 0)

    async def get(self) -> Key:
        """Wait for a key and return it. The caller must call :meth:`done` with it in any case."""
        while not self._ready:
            self._wake.clear()
            await self._wake.wait()
        key = self._ready.popleft()
        self._queued.discard(key)
        self._processing.add(key)
        return key

    def done(self, key: Key) -> None:
        """End the processing of ``key``. If it was added meanwhile, it is queued again soon."""
        self._processing.discard(key)
        if key in self._dirty:
            self._dirty.discard(key)
            self.add_after(key, self._settle)

    def close(self) -> None:
        """Cancel all delayed keys."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _add_due(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)

    def _cancel_timer(self, key: Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
