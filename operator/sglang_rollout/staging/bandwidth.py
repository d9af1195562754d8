"""Limit the bytes per second that one pod sends or receives for staging.

All transfers of one direction share one token bucket. A transfer asks for its next part, waits, and then moves it. The parts are so small
that no transfer waits long for its turn, or the other side would take it for dead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PART_BYTES = 2**20
"""Bytes of the largest part."""
_MIN_PART_BYTES = 2**10
_PARTS_PER_SECOND, _TURNS_PER_SECOND = 256, 2
"""Minimum parts per second: of a pod, and of each transfer."""
_BURST_SECONDS = 0.1
"""Seconds of unused bandwidth that may be used later."""


class TokenBucket:
    """Bytes that may move at a constant rate. Pure: the caller reads the clock.

    Args:
        rate: Bytes per second.
    """

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self._free_at: float | None = None
        """When all bytes that were taken may have moved."""

    def take(self, count: int, now: float) -> float:
        """Take bytes, and return the seconds after which they may move."""
        earliest = now - _BURST_SECONDS
        begin = earliest if self._free_at is None else max(self._free_at, earliest)
        self._free_at = begin + count / self.rate
        return max(0.0, self._free_at - now)


class Bandwidth:
    """The bytes per second of one direction, which any number of transfers share. Threads may use it.

    Args:
        limit: Bytes per second; None: not limited.
        clock: Returns the seconds of a monotonic clock.
    """

    def __init__(self, limit: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._bucket = TokenBucket(limit) if limit is not None else None
        self._clock = clock
        self._lock = threading.Lock()
        self._transfers = 0

    @property
    def limit(self) -> int | None:
        """Bytes per second; None: not limited."""
        return self._bucket.rate if self._bucket is not None else None

    def describe_limit(self) -> str:
        """Return a sentence about the limit, for copies that are late; empty without one."""
        if self.limit is None:
            return ""
        return (
            f"A pod receives at most {self.limit} bytes per second, and sends at most {self.limit} in total"
            " (weights.staging.bandwidthLimit). Raise the limit or deadlines.stageSeconds."
        )

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Count a transfer for the length of the block. The more there are, the smaller are the parts."""
        with self._lock:
            self._transfers += 1
        try:
            yield
        finally:
            with self._lock:
                self._transfers -= 1

    def take_part(self, most: int) -> tuple[int, float]:
        """Return the bytes of the next part, at most so many, and the seconds to wait before they move."""
        with self._lock:
            if self._bucket is None:
                return min(most, PART_BYTES), 0.0
            share = self._bucket.rate // max(_PARTS_PER_SECOND, _TURNS_PER_SECOND * self._transfers)
            part = min(most, PART_BYTES, max(_MIN_PART_BYTES, share))
            return part, self._bucket.take(part, self._clock())
