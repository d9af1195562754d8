"""The work queue of the operator, with client-go's semantics.

The states of a key::

                 add                      get                     done
    (absent) ──────────► queued ─────────────────► processing ───────────► (absent)
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

_Item = TypeVar("_Item", bound=Hashable)

# client-go's defaults are 5 ms and 1000 s. A retry within 100 ms of a refusal is useless, and a delay above a minute would leave a fleet
# unattended after a long outage.
FIRST_DELAY_SECONDS = 0.1
LAST_DELAY_SECONDS = 60.0
SETTLE_SECONDS = 0.1
"""The operator's own writes return as a burst of events. This delay turns the burst into one more reconcile instead of five. It also
limits the rate of writes if another client keeps changing the same fields."""


class WorkQueue(Generic[_Item]):
    """Keys that wait for a worker. Use a queue from one event loop only."""

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
        self._ready: deque[_Item] = deque()
        self._queued: set[_Item] = set()
        self._processing: set[_Item] = set()
        self._dirty: set[_Item] = set()
        self._failures: dict[_Item, int] = {}
        self._timers: dict[_Item, asyncio.TimerHandle] = {}
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, key: _Item) -> None:
        """Queue ``key`` for the next free worker."""
        self._cancel_timer(key)
        if key in self._processing:
            self._dirty.add(key)
        elif key not in self._queued:
            self._queued.add(key)
            self._ready.append(key)
            self._wake.set()

    def add_after(self, key: _Item, delay: float) -> None:
        """Queue ``key`` in ``delay`` seconds. Of several such requests, the earliest applies."""
        loop = asyncio.get_running_loop()
        waiting = self._timers.get(key)
        if waiting is not None:
            if waiting.when() <= loop.time() + delay:
                return
            waiting.cancel()
        self._timers[key] = loop.call_later(delay, self._add_due, key)

    def retry(self, key: _Item, *, at_least: float = 0.0, at_most: float | None = None) -> float:
        """Queue ``key`` after a delay that doubles with each failure, within the limits given. Return the delay."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        # The exponent is bounded first, because 2**1100 does not fit a float.
        exponential = self._first_delay * float(2 ** min(failures, 30))
        limit = self._last_delay if at_most is None else at_most
        delay = max(min(exponential, limit) * self._jitter(), at_least)
        self.add_after(key, delay)
        return delay

    def forget(self, key: _Item) -> None:
        """Reset the failures of ``key`` after a success, so that the next failure starts with the short delay."""
        self._failures.pop(key, None)

    async def get(self) -> _Item:
        """Wait for a key and return it. The caller must call :meth:`done` with it in any case."""
        while not self._ready:
            self._wake.clear()
            await self._wake.wait()
        key = self._ready.popleft()
        self._queued.discard(key)
        self._processing.add(key)
        return key

    def done(self, key: _Item) -> None:
        """End the processing of ``key``. If the key was added meanwhile, queue it again after the settle delay."""
        self._processing.discard(key)
        if key in self._dirty:
            self._dirty.discard(key)
            self.add_after(key, self._settle)

    def close(self) -> None:
        """Cancel all delayed keys."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _add_due(self, key: _Item) -> None:
        self._timers.pop(key, None)
        self.add(key)

    def _cancel_timer(self, key: _Item) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
