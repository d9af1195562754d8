"""Workers that reconcile the rollouts of the work queue, and schedule the next reconcile by the result."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from sglang_rollout.controller.metrics import Key, Metrics
from sglang_rollout.controller.reconcile import Result
from sglang_rollout.controller.workqueue import WorkQueue
from sglang_rollout.kube.errors import ApiUnavailable, KubeError

log = logging.getLogger(__name__)

RECONCILE_TIMEOUT_SECONDS = 120.0
"""Each request has a deadline of 30 s; a reconcile of many slow requests must end as well."""
OUTAGE_DELAY_SECONDS = 3.0
"""Longest delay while the API server is away. All keys wait for the same event, so the delay does not grow with failures."""


class Outage:
    """Logs once that the API server is away, and once that it is back."""

    def __init__(self) -> None:
        self._since: float | None = None

    def begin(self, error: KubeError) -> None:
        """Note that a request got no answer."""
        if self._since is None:
            self._since = time.monotonic()
            log.warning("waiting for the API server: %s", error)

    def end(self) -> None:
        """Note that a request was answered."""
        if self._since is not None:
            log.info("the API server answers again, after %.0f s", time.monotonic() - self._since)
            self._since = None


class Workers:
    """Tasks that reconcile keys from the queue; no key is reconciled twice at once."""

    def __init__(self, queue: WorkQueue[Key], reconcile: Callable[[Key], Awaitable[Result]], *, metrics: Metrics) -> None:
        self._queue = queue
        self._reconcile = reconcile
        self._metrics = metrics
        self._outage = Outage()
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
