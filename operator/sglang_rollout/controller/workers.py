"""The workers that take keys from the queue, and the relist that puts all of them in from time to time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from sglang_rollout.controller.metrics import Key, Metrics
from sglang_rollout.controller.reconcile import Result
from sglang_rollout.controller.workqueue import WorkQueue
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import ApiUnavailable, KubeError
from sglang_rollout.kube.resources import ROLLOUTS

log = logging.getLogger(__name__)

# Every request has its own deadline of 30 s; a reconcile of many slow ones must still end.
RECONCILE_DEADLINE = 120.0
# While the API server is away all keys wait for the same thing: look again soon, however often it has failed.
OUTAGE_DELAY = 3.0
RELIST_RETRY = 5.0


class Outage:
    """Says once that the API server is away, and once that it is back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None

    def away(self, error: KubeError) -> None:
        """A request got no answer."""
        if self._since is None:
            self._since = self._clock()
            log.warning("waiting for the API server: %s", error)

    def back(self) -> None:
        """A request was answered."""
        if self._since is not None:
            log.info("the API server answers again, after %.0f s", self._clock() - self._since)
            self._since = None


class Workers:
    """A few tasks that reconcile what the queue gives them, each key by one at a time."""

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
        """Cancel the workers and wait for their end. What they were doing is done again at the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def dead(self) -> str:
        """A sentence if a worker has ended, which none ever should; else empty."""
        for task in self._tasks:
            if task.done():
                reason = "cancelled" if task.cancelled() else repr(task.exception())
                return f"{task.get_name()} has ended: {reason}"
        return ""

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            try:
                await self._one(key)
            finally:
                self._queue.done(key)

    async def _one(self, key: Key) -> None:
        started = time.monotonic()
        result = "error"
        try:
            async with asyncio.timeout(RECONCILE_DEADLINE):
                done = await self._reconcile(key)
        except ApiUnavailable as error:
            result = "unavailable"
            self._outage.away(error)
            self._put_off(key, at_least=error.retry_after or 0.0, at_most=OUTAGE_DELAY)
        except KubeError as error:
            result = "conflict"
            delay = self._put_off(key)
            log.warning("%s/%s: trying again in %.1f s: %s", *key, delay, error)
        except TimeoutError:
            delay = self._put_off(key)
            log.warning("%s/%s: not done after %.0f s; trying again in %.1f s", *key, RECONCILE_DEADLINE, delay)
        except Exception:
            # A defect in one rollout's reconcile must not stop the others, nor this one for ever.
            delay = self._put_off(key)
            log.exception("%s/%s: a defect in the operator; trying again in %.1f s", *key, delay)
        else:
            result = done.name
            self._outage.back()
            self._after(key, done)
        finally:
            self._metrics.reconciled(result, time.monotonic() - started)

    def _after(self, key: Key, done: Result) -> None:
        if done.retry:
            self._put_off(key)
            return
        self._queue.forget(key)
        if done.requeue_after is not None:
            self._queue.add_after(key, done.requeue_after)

    def _put_off(self, key: Key, *, at_least: float = 0.0, at_most: float | None = None) -> float:
        self._metrics.retried()
        return self._queue.retry(key, at_least=at_least, at_most=at_most)


async def relist(kube: Kube, queue: WorkQueue[Key], namespaces: tuple[str, ...], *, seconds: float, metrics: Metrics) -> None:
    """Every ``seconds``: list all rollouts and queue them. A watch that died without a word then costs only time."""
    while True:
        try:
            for namespace in namespaces or (None,):
                for item in (await kube.list(ROLLOUTS, namespace)).items:
                    queue.add((item["metadata"]["namespace"], item["metadata"]["name"]))
        except KubeError as error:
            log.debug("relist: %s", error)
            await asyncio.sleep(RELIST_RETRY)
        else:
            metrics.listed()
            await asyncio.sleep(seconds)
