"""The work queue of rollouts, and the workers that reconcile them.

The queue has client-go's semantics::

                 add                      get                     done
    (absent) ──────────► queued ─────────────────► processing ───────────► (absent)
                          ▲  │ add: nothing            │ add: dirty
                          └──┘                         └────── done while dirty ──► queued

A key is in at most one of *queued* and *processing*. So each key has one worker at a time, and a burst of events costs one reconcile.
If events arrive during that reconcile, a second one follows, because the first may have read older objects.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from sglang_rollout.controller.metrics import Key, Metrics
from sglang_rollout.controller.reconcile import Result
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import ApiUnavailable, KubeError
from sglang_rollout.kube.resources import ROLLOUTS

log = logging.getLogger(__name__)

_Item = TypeVar("_Item", bound=Hashable)

# client-go's defaults are 5 ms and 1000 s. A retry within 100 ms of a refusal is useless, and a delay above a minute would leave a fleet
# unattended after a long outage.
FIRST_DELAY_SECONDS = 0.1
LAST_DELAY_SECONDS = 60.0
SETTLE_SECONDS = 0.1
"""The operator's own writes return as a burst of events. This delay turns the burst into one more reconcile instead of five. It also
limits the rate of writes if another client keeps changing the same fields."""
RECONCILE_TIMEOUT_SECONDS = 120.0
"""Each request has a deadline of 30 s; a reconcile of many slow requests must end as well."""
OUTAGE_DELAY_SECONDS = 3.0
"""Longest delay while the API server is away. All keys wait for the same event, so the delay does not grow with failures."""
RELIST_RETRY_SECONDS = 5.0


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


class Outage:
    """Logs once that the API server is away, and once that it is back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None

    def begin(self, error: KubeError) -> None:
        """Note that a request got no answer."""
        if self._since is None:
            self._since = self._clock()
            log.warning("waiting for the API server: %s", error)

    def end(self) -> None:
        """Note that a request was answered."""
        if self._since is not None:
            log.info("the API server answers again, after %.0f s", self._clock() - self._since)
            self._since = None


class Workers:
    """Tasks that reconcile keys from the queue; no key is reconciled twice at once."""

    def __init__(
        self,
        queue: WorkQueue[Key],
        reconcile: Callable[[Key], Awaitable[Result]],
        *,
        metrics: Metrics,
        outage: Outage | None = None,
    ) -> None:
        self._queue = queue
        self._reconcile = reconcile
        self._metrics = metrics
        self._outage = outage or Outage()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, count: int) -> None:
        """Start ``count`` workers in the running loop."""
        self._tasks = [asyncio.create_task(self._work(), name=f"worker {index}") for index in range(count)]

    async def stop(self) -> None:
        """Cancel the workers and wait for their end. The next start repeats interrupted reconciles."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def find_dead_worker(self) -> str:
        """Return a message if a worker has ended, which is always a defect; else an empty string."""
        for task in self._tasks:
            if task.done():
                reason = "cancelled" if task.cancelled() else repr(task.exception())
                return f"{task.get_name()} has ended: {reason}"
        return ""

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            try:
                await self._reconcile_key(key)
            finally:
                self._queue.done(key)

    async def _reconcile_key(self, key: Key) -> None:
        started = time.monotonic()
        result = "error"
        try:
            async with asyncio.timeout(RECONCILE_TIMEOUT_SECONDS):
                done = await self._reconcile(key)
        except ApiUnavailable as error:
            result = "unavailable"
            self._outage.begin(error)
            self._retry_later(key, at_least=error.retry_after or 0.0, at_most=OUTAGE_DELAY_SECONDS)
        except KubeError as error:
            result = "conflict"
            delay = self._retry_later(key)
            log.warning("%s/%s: trying again in %.1f s: %s", *key, delay, error)
        except TimeoutError:
            delay = self._retry_later(key)
            log.warning("%s/%s: not finished after %.0f s; trying again in %.1f s", *key, RECONCILE_TIMEOUT_SECONDS, delay)
        except Exception:
            # A defect in the reconcile of one rollout must not stop the worker, and the rollout is retried.
            delay = self._retry_later(key)
            log.exception("%s/%s: defect in the operator; trying again in %.1f s", *key, delay)
        else:
            result = done.name
            self._outage.end()
            self._schedule_next(key, done)
        finally:
            self._metrics.count_reconcile(result, time.monotonic() - started)

    def _schedule_next(self, key: Key, done: Result) -> None:
        if done.retry:
            self._retry_later(key)
            return
        self._queue.forget(key)
        if done.requeue_after is not None:
            self._queue.add_after(key, done.requeue_after)

    def _retry_later(self, key: Key, *, at_least: float = 0.0, at_most: float | None = None) -> float:
        self._metrics.count_retry()
        return self._queue.retry(key, at_least=at_least, at_most=at_most)


async def relist_periodically(kube: Kube, queue: WorkQueue[Key], namespaces: tuple[str, ...], *, seconds: float, metrics: Metrics) -> None:
    """List and queue all rollouts every ``seconds``, so that a watch that ended silently only delays a reconcile."""
    while True:
        try:
            for namespace in namespaces or (None,):
                for item in (await kube.list(ROLLOUTS, namespace)).items:
                    queue.add((item["metadata"]["namespace"], item["metadata"]["name"]))
        except KubeError as error:
            log.debug("relist: %s", error)
            await asyncio.sleep(RELIST_RETRY_SECONDS)
        else:
            metrics.mark_relisted()
            await asyncio.sleep(seconds)
