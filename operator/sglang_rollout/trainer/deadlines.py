"""Deadlines, and calls in background threads that never keep the process from ending."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Deadline:
    """A point in time that several waits share."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    @property
    def has_passed(self) -> bool:
        """True if no time is left."""
        return self.remaining <= 0.0


def run_in_background(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
    """Run ``function`` in a daemon thread and return a future of its result.

    A ``ThreadPoolExecutor`` would block the exit of the interpreter: its threads are joined at exit, and a thread inside
    a collective whose peers are gone may never return.
    """
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - the future raises the error again in the waiting thread
            future.set_exception(error)

    threading.Thread(target=run, name=f"rollout-{getattr(function, '__name__', 'call')}", daemon=True).start()
    return future
