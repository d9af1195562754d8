"""Lines of the audit log about refused calls are limited by address."""

from __future__ import annotations

from sglang_rollout.logs import MAX_ADDRESSES, MAX_REFUSED_LINES, OTHERS, RefusedCalls


def test_the_first_refused_calls_of_an_address_get_a_line_and_the_others_are_counted() -> None:
    calls = RefusedCalls()
    assert [calls.count("10.0.0.9") for _ in range(MAX_REFUSED_LINES + 5)] == [True] * MAX_REFUSED_LINES + [False] * 5
    assert calls.count("10.0.0.8")
    assert calls.take_omitted() == {"10.0.0.9": 5}


def test_counts_start_again_after_they_were_written() -> None:
    calls = RefusedCalls()
    for _ in range(MAX_REFUSED_LINES + 1):
        calls.count("10.0.0.9")
    calls.take_omitted()
    assert calls.count("10.0.0.9")
    assert calls.take_omitted() == {}


def test_many_addresses_share_one_count() -> None:
    calls = RefusedCalls()
    lines = sum(calls.count(f"10.0.{number // 256}.{number % 256}") for number in range(MAX_ADDRESSES + 1000))
    assert lines == MAX_ADDRESSES + MAX_REFUSED_LINES
    assert calls.take_omitted() == {OTHERS: 1000 - MAX_REFUSED_LINES}
