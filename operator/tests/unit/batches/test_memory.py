"""The bound of a body's memory, and the budget of all requests."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from sglang_rollout.batches.memory import Budget, ExhaustedError, TooLargeError, objects_bytes

BODIES: dict[str, Any] = {
    "token IDs": {"input_ids": [[1000 + number for number in range(500)] for _ in range(40)]},
    "one token each": {"input_ids": [[1000 + number] for number in range(10_000)]},
    "texts": {"text": [f"prompt {number} " + "x" * 100 for number in range(5000)]},
    "one emoji in each text": {"text": [f"{number}\U0001f600" + "x" * 100 for number in range(5000)]},
    "Chinese": {"text": [f"{number}" + "\u6f22" * 100 for number in range(5000)]},
    "short texts": {"text": [str(number) for number in range(10_000)]},
    "empty lists": {"text": [[] for _ in range(20_000)]},
    "empty objects": {"text": [{} for _ in range(20_000)]},
    "small objects": {"text": [{"a": 1000 + number} for number in range(10_000)]},
    "different keys": {"text": [{f"key {number}": 0.5} for number in range(10_000)]},
    "one large object": {f"key {number}": 1000 + number for number in range(10_000)},
    "floats": {"input_embeds": [[0.5 + number for number in range(1000)] for _ in range(20)]},
    "nested lists": {"text": [[[[[1000]]]] for _ in range(5000)]},
}


@pytest.mark.parametrize("escaped", [True, False])
@pytest.mark.parametrize("name", BODIES)
def test_the_objects_of_a_body_take_no_more_than_the_bound(name: str, escaped: bool) -> None:
    data = json.dumps(BODIES[name], ensure_ascii=escaped, separators=(",", ":")).encode()
    tracemalloc.start()
    try:
        body = json.loads(data)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert body
    assert taken <= objects_bytes(data)


def test_a_share_is_given_back_at_its_end() -> None:
    budget = Budget()
    with budget.share() as first, budget.share() as second:
        first.set_body(100)
        first.set_body(40)
        second.set_body(5)
        second.add_answer(7)
        assert budget.used == 52
    assert budget.used == 0


def test_a_body_is_refused_forever_if_it_alone_is_too_large_and_for_now_if_others_have_the_memory() -> None:
    budget = Budget()
    with budget.share() as first, budget.share() as second:
        with pytest.raises(TooLargeError, match="split the batch"):
            first.set_body(budget.bodies + 1)
        first.set_body(budget.bodies - 10)
        second.set_body(10)
        with pytest.raises(ExhaustedError, match="Try again"):
            second.set_body(11)
        assert (budget.used, budget.refused) == (budget.bodies, 1)


def test_one_address_has_half_of_the_memory_of_bodies_or_one_body() -> None:
    budget = Budget()
    half = budget.bodies // 2
    with budget.share("10.0.0.1") as first, budget.share("10.0.0.1") as second, budget.share("10.0.0.2") as other:
        first.set_body(half - 10)
        second.set_body(10)
        with pytest.raises(ExhaustedError, match="from this address"):
            second.set_body(11)
        other.set_body(half)
        other.set_body(0)
        second.set_body(0)
        first.set_body(budget.bodies)
        with pytest.raises(ExhaustedError):
            second.set_body(1)
    assert budget.used == 0
    assert not budget.bodies_by_address


def test_the_first_refusal_is_logged_until_half_of_the_budget_is_free(caplog: pytest.LogCaptureFixture) -> None:
    budget = Budget(60 * 2**20)
    with budget.share() as refused:
        for _ in range(2):
            with budget.share() as first:
                first.add_answer(budget.total)
                for _ in range(3):
                    with pytest.raises(ExhaustedError):
                        refused.set_body(1)
                first.set_body(0)
    assert [record.getMessage() for record in caplog.records] == [
        "batches take 10 MiB of 10 MiB of memory: requests get 503 until some have ended"
    ] * 2
    assert budget.refused == 6


def test_bodies_leave_memory_for_answers() -> None:
    budget = Budget()
    with budget.share() as share:
        share.set_body(budget.bodies)
        share.add_answer(budget.total - budget.bodies)
        with pytest.raises(TooLargeError, match="split the batch"):
            share.add_answer(1)


def test_answers_are_refused_for_now_if_other_requests_have_the_memory() -> None:
    budget = Budget()
    with budget.share() as first, budget.share() as second:
        first.add_answer(budget.total - 10)
        with pytest.raises(ExhaustedError, match="Try again"):
            second.add_answer(11)
