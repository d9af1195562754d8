"""Progress lines with durations, and errors for users of the lab."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class LabError(Exception):
    """An error that the user can correct. The message names the cause and the remedy."""


_QUIET_SECONDS = 30.0
_last = {"line": time.monotonic()}
"""Moment of the last line, for steps that must say that they still run."""


def say(text: str) -> None:
    """Print one line to stderr without buffering. Only output for scripts is printed to stdout."""
    _last["line"] = time.monotonic()
    print(text, file=sys.stderr, flush=True)


@contextmanager
def step(title: str, *, quiet_seconds: float = _QUIET_SECONDS) -> Iterator[None]:
    """Print ``title`` with its duration when the step ends; on a terminal also when the step begins.

    A step that prints nothing for ``quiet_seconds`` says that it still runs, and for how long.
    """
    if sys.stderr.isatty():
        print(f"  …     {title}", end="\r", file=sys.stderr, flush=True)
    begin = time.monotonic()
    ended = threading.Event()
    threading.Thread(target=_say_that_it_runs, args=(title, begin, quiet_seconds, ended), daemon=True).start()
    try:
        yield
    except BaseException:
        ended.set()
        say(f"  FAILED after {time.monotonic() - begin:.1f} s: {title}")
        raise
    ended.set()
    say(f"{time.monotonic() - begin:6.1f} s  {title}")


def _say_that_it_runs(title: str, begin: float, quiet_seconds: float, ended: threading.Event) -> None:
    while not ended.wait(max(0.01, _last["line"] + quiet_seconds - time.monotonic())):
        if time.monotonic() - max(_last["line"], begin) >= quiet_seconds:
            say(f"{time.monotonic() - begin:6.0f} s  … {title}")


def wait_until(ready: Callable[[], bool], *, seconds: float, what: str, every: float = 0.1) -> None:
    """Call ``ready`` until it returns True. Raises LabError with the message ``what`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise LabError(f"{what} (waited {seconds:.0f} s)")
        time.sleep(every)
