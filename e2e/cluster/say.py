"""Progress lines with durations, and errors for users of the lab."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class LabError(Exception):
    """An error that the user can correct. The message names the cause and the remedy."""


def say(text: str) -> None:
    """Print one line to stderr without buffering. Only output for scripts is printed to stdout."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def step(title: str) -> Iterator[None]:
    """Print ``title`` with its duration when the step ends; on a terminal also when the step begins."""
    terminal = sys.stderr.isatty()
    if terminal:
        print(f"  …     {title}", end="\r", file=sys.stderr, flush=True)
    begin = time.monotonic()
    try:
        yield
    except BaseException:
        say(f"  FAILED after {time.monotonic() - begin:.1f} s: {title}")
        raise
    say(f"{time.monotonic() - begin:6.1f} s  {title}")


def wait_until(ready: Callable[[], bool], *, seconds: float, what: str, every: float = 0.1) -> None:
    """Call ``ready`` until it returns True. Raises LabError with the message ``what`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise LabError(f"{what} (waited {seconds:.0f} s)")
        time.sleep(every)
