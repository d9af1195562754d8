"""The limit of the bytes per second that transfers share, under a clock that the tests set."""

from __future__ import annotations

import heapq
from contextlib import ExitStack
from itertools import pairwise

import pytest

from sglang_rollout.staging.bandwidth import PART_BYTES, Bandwidth

RATE = 10 * 2**20
SECONDS = 20


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def move_bytes(bandwidth: Bandwidth, clock: Clock, transfers: int, seconds: float) -> list[tuple[float, int, int]]:
    """Run transfers that never end for some seconds. Return when each part moved, its bytes and its transfer."""
    moved: list[tuple[float, int, int]] = []
    ready = [(clock.now, number, 0) for number in range(transfers)]
    end = clock.now + seconds
    with ExitStack() as stack:
        for _ in range(transfers):
            stack.enter_context(bandwidth.transfer())
        while ready[0][0] < end:
            clock.now, number, allowed = heapq.heappop(ready)
            if allowed:
                moved.append((clock.now, allowed, number))
            part, wait = bandwidth.take_part(2**40)
            heapq.heappush(ready, (clock.now + wait, number, part))
    return moved


@pytest.mark.parametrize("transfers", [1, 4, 300])
def test_all_transfers_together_move_the_limit_in_every_second(transfers: int) -> None:
    clock = Clock()
    moved = move_bytes(Bandwidth(RATE, clock), clock, transfers, SECONDS)
    for second in range(SECONDS - 1):
        begin = 1000.0 + second
        count = sum(part for at, part, _ in moved if begin <= at < begin + 1)
        assert count <= RATE * 1.1 + PART_BYTES, "more than the limit, a burst and one part"
        assert count >= RATE - PART_BYTES, "less than the limit"


def test_each_of_many_transfers_has_its_turn_before_its_reader_gives_up() -> None:
    """Readers give a sender up after 5 s without a byte."""
    clock, limit, transfers = Clock(), 2**20, 400
    moved = move_bytes(Bandwidth(limit, clock), clock, transfers, SECONDS)
    for number in range(transfers):
        times = [1000.0, *(at for at, _, each in moved if each == number), 1000.0 + SECONDS]
        assert max(later - earlier for earlier, later in pairwise(times)) < 5


def test_a_pause_is_not_made_up_for() -> None:
    clock = Clock()
    bandwidth = Bandwidth(RATE, clock)
    bandwidth.take_part(1)
    clock.now += 3600
    with bandwidth.transfer():
        taken = [bandwidth.take_part(PART_BYTES) for _ in range(500)]
    assert sum(part for part, wait in taken if not wait) <= RATE / 10, "more than a burst of a tenth of a second"
    assert taken[-1][1] == pytest.approx(sum(part for part, _ in taken) / RATE - 0.1)


def test_without_a_limit_no_transfer_waits() -> None:
    bandwidth = Bandwidth()
    assert [bandwidth.take_part(2**40) for _ in range(3)] == [(PART_BYTES, 0.0)] * 3
    assert bandwidth.take_part(7) == (7, 0.0)
    assert not bandwidth.describe_limit()
