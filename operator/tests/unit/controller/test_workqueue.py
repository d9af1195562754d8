"""The work queue has the semantics of client-go. Time is virtual."""

from __future__ import annotations

import asyncio

import pytest

from sglang_rollout.controller.workqueue import WorkQueue
from tests.support.virtual_time import run


def make(**changes: float) -> WorkQueue[str]:
    defaults = {"first_delay": 1.0, "last_delay": 60.0, "settle": 0.5}
    return WorkQueue(**{**defaults, **changes}, jitter=lambda: 1.0)


def now() -> float:
    return asyncio.get_running_loop().time()


async def gets_nothing(queue: WorkQueue[str], seconds: float) -> bool:
    try:
        key = await asyncio.wait_for(queue.get(), seconds)
    except TimeoutError:
        return True
    queue.done(key)
    return False


def test_a_burst_of_events_is_one_reconcile() -> None:
    async def main() -> None:
        queue = make()
        for _ in range(10):
            queue.add("a")
        assert len(queue) == 1
        assert await queue.get() == "a"
        queue.done("a")
        assert await gets_nothing(queue, 100)

    run(main())


def test_keys_are_returned_in_the_order_of_add() -> None:
    async def main() -> None:
        queue = make()
        for key in "cab":
            queue.add(key)
        assert [await queue.get() for _ in range(3)] == ["c", "a", "b"]

    run(main())


def test_key_has_one_worker_at_a_time() -> None:
    async def main() -> None:
        queue = make()
        queue.add("a")
        assert await queue.get() == "a"
        queue.add("a")
        queue.add("b")
        assert await queue.get() == "b"
        assert await gets_nothing(queue, 100)

    run(main())


def test_events_during_a_reconcile_cause_one_more() -> None:
    async def main() -> None:
        queue = make()
        queue.add("a")
        await queue.get()
        queue.add("a")
        queue.add("a")
        queue.done("a")
        assert len(queue) == 0
        assert await queue.get() == "a"
        assert now() == pytest.approx(0.5)
        queue.done("a")
        assert await gets_nothing(queue, 100)

    run(main())


def test_failures_are_retried_with_doubling_delays_up_to_the_limit() -> None:
    async def main() -> None:
        queue = make(last_delay=10.0)
        delays = []
        queue.add("a")
        for _ in range(6):
            before = now()
            await queue.get()
            delays.append(now() - before)
            queue.retry("a")
            queue.done("a")
        assert delays == pytest.approx([0, 1, 2, 4, 8, 10])

    run(main())


def test_thousands_of_failures_do_not_overflow() -> None:
    async def main() -> None:
        queue = make()
        for _ in range(3000):
            delay = queue.retry("a")
        assert delay == 60.0

    run(main())


def test_limits_of_one_retry() -> None:
    async def main() -> None:
        queue = make()
        assert queue.retry("a", at_least=7.0) == 7.0
        for _ in range(10):
            queue.retry("b")
        assert queue.retry("b", at_most=3.0) == 3.0

    run(main())


def test_forget_starts_the_delays_again() -> None:
    async def main() -> None:
        queue = make()
        assert [queue.retry("a") for _ in range(3)] == [1, 2, 4]
        queue.forget("a")
        assert queue.retry("a") == 1

    run(main())


def test_jitter_spreads_the_retries() -> None:
    async def main() -> None:
        queue: WorkQueue[int] = WorkQueue(first_delay=1.0)
        delays = {queue.retry(key) for key in range(50)}
        assert len(delays) > 40
        assert all(0.8 <= delay <= 1.2 for delay in delays)

    run(main())


def test_an_event_does_not_wait_for_the_back_off() -> None:
    async def main() -> None:
        queue = make(first_delay=50.0)
        queue.retry("a")
        queue.add("a")
        assert await queue.get() == "a"
        assert now() == 0.0
        queue.done("a")
        # The timer of the retry went with it: no second, needless reconcile.
        assert await gets_nothing(queue, 100)

    run(main())


@pytest.mark.parametrize(("first", "second"), [(5.0, 20.0), (20.0, 5.0)])
def test_earliest_of_several_delayed_requests_is_used(first: float, second: float) -> None:
    async def main() -> None:
        queue = make()
        queue.add_after("a", first)
        queue.add_after("a", second)
        await queue.get()
        assert now() == pytest.approx(5.0)
        queue.done("a")
        assert await gets_nothing(queue, 100)

    run(main())


def test_delayed_request_due_during_a_reconcile_is_not_lost() -> None:
    async def main() -> None:
        queue = make()
        queue.add("a")
        await queue.get()
        queue.add_after("a", 1.0)
        await asyncio.sleep(2.0)
        queue.done("a")
        assert await queue.get() == "a"

    run(main())


def test_close_cancels_delayed_keys() -> None:
    async def main() -> None:
        queue = make()
        queue.add_after("a", 1.0)
        queue.close()
        assert await gets_nothing(queue, 100)

    run(main())


def test_several_workers_share_the_keys() -> None:
    async def main() -> None:
        queue: WorkQueue[int] = WorkQueue()
        active: set[int] = set()
        seen: list[int] = []

        async def work() -> None:
            while True:
                key = await queue.get()
                assert key not in active
                active.add(key)
                await asyncio.sleep(1.0)
                active.discard(key)
                seen.append(key)
                queue.done(key)

        workers = [asyncio.create_task(work()) for _ in range(4)]
        for _ in range(3):
            for key in range(8):
                queue.add(key)
        await asyncio.sleep(2.5)
        assert sorted(seen) == list(range(8))
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)

    run(main())
