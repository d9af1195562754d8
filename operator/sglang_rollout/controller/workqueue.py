"""A work queue with client-go's semantics: what to reconcile next, never the same key twice at once.

::

                 add                      get                     done
    (nowhere) ─────────► queued ─────────────────► processing ───────────► (nowhere)
                          ▲  │ add: nothing            │ add: dirty
                          └──┘                         └────── done while dirty ──► queued

A key is in at most one of *queued* and *processing*, so each key has one worker at a time and a burst of events costs
one reconcile (or two, when events came in during the first: what it read may have been too old).
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

# client-go's defaults are 5 ms and 1000 s. Faster than 100 ms helps nobody when the API server has just refused us, and
# slower than a minute leaves a fleet unattended after a long outage.
FIRST_DELAY = 0.1
LAST_DELAY = 60.0
# Our own writes come back as a burst of events. Waiting a moment after a reconcile turns them into one more, not five,
# and bounds how fast we can fight with somebody who keeps changing what we render.
SETTLE = 0.1


class WorkQueue(Generic[Key]):
    """Keys waiting for a worker. All methods but :meth:`get` return at once; use from one event loop only."""

    def __init__(
        self,
        *,
        first_delay: float = FIRST_DELAY,
        last_delay: float = LAST_DELAY,
        settle: float = SETTLE,
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
        """Ask for a reconcile of ``key`` as soon as a worker is free."""
        self._cancel_timer(key)
        if key in self._processing:
            self._dirty.add(key)
        elif key not in self._queued:
            self._queued.add(key)
            self._ready.append(key)
            self._wake.set()

    def add_after(self, key: Key, delay: float) -> None:
        """Ask for a reconcile in ``delay`` seconds. Of several such requests the earliest counts."""
        loop = asyncio.get_running_loop()
        waiting = self._timers.get(key)
        if waiting is not None:
            if waiting.when() <= loop.time() + delay:
                return
            waiting.cancel()
        self._timers[key] = loop.call_later(delay, self._due, key)

    def retry(self, key: Key, *, at_least: float = 0.0, at_most: float | None = None) -> float:
        """Ask again later, each time twice as late but within the limits given. Returns the delay."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        # The exponent is bounded before the power: 2**1100 is no float.
        exponential = self._first_delay * float(2 ** min(failures, 30))
        limit = self._last_delay if at_most is None else at_most
        delay = max(min(exponential, limit) * self._jitter(), at_least)
        self.add_after(key, delay)
        return delay

    def forget(self, key: Key) -> None:
        """The reconcile went well: the next failure starts with the short delay again."""
        self._failures.pop(key, None)

    def failures(self, key: Key) -> int:
        """How often in a row it has failed."""
        return self._failures.get(key, 0)

    async def get(self) -> Key:
        """Wait for a key; the caller must call :meth:`done` with it, whatever happens."""
        while not self._ready:
            self._wake.clear()
            await self._wake.wait()
        key = self._ready.popleft()
        self._queued.discard(key)
        self._processing.add(key)
        return key

    def done(self, key: Key) -> None:
        """The worker has finished with ``key``; it comes again soon if it was added meanwhile."""
        self._processing.discard(key)
        if key in self._dirty:
            self._dirty.discard(key)
            self.add_after(key, self._settle)

    def close(self) -> None:
        """Cancel what waits for its time."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _due(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)

    def _cancel_timer(self, key: Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
