"""Deadlines, and work in the background that can never keep the process from ending."""

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
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.remaining <= 0.0


def background(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
    """Run ``function`` in a daemon thread.

    Not a ``ThreadPoolExecutor``: the interpreter joins an executor's threads at exit, and a thread inside a collective
    whose peers are gone may never return.
    """
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the future
            future.set_exception(error)

    threading.Thread(target=run, name=f"rollout-{getattr(function, '__name__', 'call')}", daemon=True).start()
    return future
