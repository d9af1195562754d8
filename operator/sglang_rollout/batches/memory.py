"""Memory that requests may take, counted in bytes. Does no I/O except for log lines.

Python objects take up to 40 times the memory of their JSON text, so bodies are counted by an upper bound of the memory of their objects.
"""

from __future__ import annotations

import logging
from collections import Counter
from types import TracebackType
from typing import Self

log = logging.getLogger(__name__)

DEFAULT_LIMIT_BYTES = 6 * 2**30
"""Default memory limit of the process."""

_COSTS = {b"{": 240, b"[": 120, b":": 100, b",": 48, b'"': 32}
"""Bytes of memory for each occurrence of a character: a dictionary or list with one value, a further key, a further number, half a
string. Characters inside of strings count, too, so the sum is an upper bound."""
_WIDEST_CHARACTER = 4
"""Bytes of each character of a string that contains an emoji."""


class TooLargeError(Exception):
    """One request alone exceeds the budget, so a retry is useless."""


class ExhaustedError(Exception):
    """The bodies and answers of all requests exceed the budget. A retry may succeed."""


def objects_bytes(data: bytes) -> int:
    """Return an upper bound of the memory that the objects of a JSON text take."""
    width = 1 if data.isascii() and b"\\u" not in data else _WIDEST_CHARACTER
    return width * len(data) + sum(cost * data.count(character) for character, cost in _COSTS.items())


class Budget:
    """Counts the memory of all requests.

    Args:
        limit: Memory limit of the process. The budget is a sixth of it, because ``python -m bench.memory`` measures a peak of 2.7 times the
            budget: parsing, buffers of connections, and requests in flight take memory, too.
    """

    def __init__(self, limit: int = DEFAULT_LIMIT_BYTES) -> None:
        self.total = limit // 6
        """Bytes that all bodies and answers may take."""
        self.bodies = self.total * 3 // 4
        """Bytes of these that bodies may take. The rest stays free for answers."""
        self.used = 0
        """Bytes that requests have taken."""
        self.bodies_by_address: Counter[str] = Counter()
        """Bytes of these that the bodies of each address have taken."""
        self.refused = 0
        """Requests that were refused because the budget was exhausted."""
        self._is_exhausted = False
        """True from a refusal until half of the budget is free."""

    def share(self, address: str | None = None) -> Share:
        """Return the share of one request from an address; None: an address that has no limit of its own."""
        return Share(self, address)

    def add(self, size: int) -> None:
        """Add memory that a request has taken; a negative size gives memory back."""
        self.used += size
        if self.used <= self.total // 2:
            self._is_exhausted = False

    def count_refusal(self) -> None:
        """Count a refused request, and log the first one."""
        self.refused += 1
        if not self._is_exhausted:
            self._is_exhausted = True
            log.warning(
                "batches take %d MiB of %d MiB of memory: requests get 503 until some have ended", self.used >> 20, self.total >> 20
            )


class Share:
    """Memory of one request. Use as a context manager, which gives the memory back."""

    def __init__(self, budget: Budget, address: str | None = None) -> None:
        self._budget = budget
        self._address = address
        self._body = 0
        self._answers = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._budget.add(-self._body - self._answers)
        self._count_body(-self._body)
        self._body = self._answers = 0

    def set_body(self, size: int) -> None:
        """Set the memory of the body.

        Raises:
            TooLargeError: The body alone exceeds the budget.
            ExhaustedError: Other requests have taken the memory, or other bodies of this address half of it.
        """
        if size > self._budget.bodies:
            raise TooLargeError(
                f"This body needs about {size >> 20} MiB of memory as objects, and at most {self._budget.bodies >> 20} MiB are allowed: "
                "split the batch."
            )
        if size > self._body:
            self._check(size - self._body, self._budget.bodies)
            self._check_address(size)
        self._budget.add(size - self._body)
        self._count_body(size - self._body)
        self._body = size

    def add_answer(self, size: int) -> None:
        """Add the memory of an answer.

        Raises:
            TooLargeError: The answers to this request alone exceed the budget.
            ExhaustedError: Other requests have taken the memory.
        """
        if self._body + self._answers + size > self._budget.total:
            raise TooLargeError(
                f"The answers to this batch need more than {self._budget.total >> 20} MiB of memory, which is the limit: "
                "split the batch, or stream it."
            )
        self._check(size, self._budget.total)
        self._budget.add(size)
        self._answers += size

    def _count_body(self, size: int) -> None:
        """Add bytes to those of the bodies of this address, and forget an address without any."""
        if self._address is not None:
            self._budget.bodies_by_address[self._address] += size
            if not self._budget.bodies_by_address[self._address]:
                del self._budget.bodies_by_address[self._address]

    def _check_address(self, size: int) -> None:
        """Refuse a body with which this address has more than half of the memory of bodies, unless it is the only body of the address."""
        others = self._budget.bodies_by_address[self._address] - self._body if self._address is not None else 0
        if others and others + size > self._budget.bodies // 2:
            self._budget.count_refusal()
            raise ExhaustedError(
                "The bodies from this address take half of the memory of the batch server, which is their limit. "
                "Try again when some requests have ended."
            )

    def _check(self, size: int, limit: int) -> None:
        if self._budget.used + size > limit:
            self._budget.count_refusal()
            raise ExhaustedError("The batches in progress take all memory of the batch server. Try again when some have ended.")
