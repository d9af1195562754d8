"""How workers handle results and failures. Time is virtual."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client import generate_latest

from sglang_rollout.controller.metrics import Key, Metrics
from sglang_rollout.controller.reconcile import Result
from sglang_rollout.controller.workers import RECONCILE_TIMEOUT_SECONDS, Workers
from sglang_rollout.controller.workqueue import WorkQueue
from sglang_rollout.kube.errors import ApiUnavailable, Conflict
from tests.support.virtual_time import run

KEY = ("n", "demo")


class Bench:
    """Workers with a scripted reconcile. Records the times of its calls."""

    def __init__(self, *steps: Result | Exception | Callable[[], Awaitable[Result]]) -> None:
        self.steps = list(steps)
        self.times: list[float] = []
        self.metrics = Metrics()

    async def reconcile(self, _key: Key) -> Result:
        self.times.append(asyncio.get_running_loop().time())
        step = self.steps.pop(0) if self.steps else Result("ok")
        if isinstance(step, Exception):
            raise step
        return step if isinstance(step, Result) else await step()

    def run(self, seconds: float) -> list[float]:
        async def main() -> None:
            queue: WorkQueue[Key] = WorkQueue(first_delay=1.0, last_delay=60.0, jitter=lambda: 1.0)
            workers = Workers(queue, self.reconcile, metrics=self.metrics)
            workers.start(2)
            queue.add(KEY)
            await asyncio.sleep(seconds)
            assert workers.find_dead_worker() == ""
            await workers.stop()
            queue.close()

        run(main())
        return self.times

    def count(self, line: str) -> float:
        text = generate_latest(self.metrics.registry).decode()
        found = [value for value in text.splitlines() if value.startswith(f"sglang_rollout_operator_{line} ")]
        return float(found[0].rsplit(" ", 1)[1]) if found else 0.0


def test_success_is_not_repeated() -> None:
    assert Bench(Result("ok")).run(1000) == [0.0]


def test_success_can_request_a_requeue() -> None:
    assert Bench(Result("ok", 30.0), Result("ok", 30.0), Result("ok")).run(1000) == [0.0, 30.0, 60.0]


def test_refusal_is_retried_with_growing_delays() -> None:
    refused = Result("refused", retry=True)
    bench = Bench(refused, refused, refused, Result("ok"))
    assert bench.run(1000) == [0.0, 1.0, 3.0, 7.0]
    assert bench.count('reconcile_total{result="refused"}') == 3
    assert bench.count("retries_total") == 3


def test_conflict_is_retried() -> None:
    assert Bench(Conflict("changed"), Conflict("changed")).run(1000) == [0.0, 1.0, 3.0]


def test_outage_is_logged_once_and_retried_at_a_constant_rate(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench(*[ApiUnavailable("connection refused")] * 20)
    times = bench.run(1000)
    assert len(times) == 21
    assert times[-1] - times[-2] == pytest.approx(3.0)
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "waiting for the API server: connection refused"
    assert len(messages) == 2
    assert messages[1].startswith("the API server answers again, after")


def test_retry_after_is_respected() -> None:
    assert Bench(ApiUnavailable("slow down", retry_after=17.0)).run(1000) == [0.0, 17.0]


def test_a_defect_is_logged_with_its_traceback_and_does_not_end_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(KeyError("oops"))
    assert bench.run(1000) == [0.0, 1.0]
    assert bench.count('reconcile_total{result="error"}') == 1
    assert "Traceback" in caplog.text
    assert "n/demo: defect in the operator" in caplog.text


def test_hanging_reconcile_times_out() -> None:
    async def hang() -> Result:
        await asyncio.sleep(1e9)
        return Result("ok")

    times = Bench(hang).run(1000)
    assert times == [0.0, RECONCILE_TIMEOUT_SECONDS + 1.0]


def test_a_worker_that_ended_is_reported() -> None:
    async def main() -> str:
        queue: WorkQueue[Key] = WorkQueue()

        async def die(_key: Key) -> Result:
            raise asyncio.CancelledError

        workers = Workers(queue, die, metrics=Metrics())
        workers.start(2)
        queue.add(KEY)
        await asyncio.sleep(1.0)
        sentence = workers.find_dead_worker()
        await workers.stop()
        return sentence

    assert run(main()) == "worker 0 has ended: cancelled"
