"""What the lab tells its user: one line per step with the time it took, and errors as sentences."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class LabError(Exception):
    """Something the user can do something about; the message says what, where and what to do."""


def say(text: str) -> None:
    """Print one line at once, also into a pipe. Progress goes to stderr: stdout holds only what a script may read."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def step(title: str) -> Iterator[None]:
    """Print ``title`` when the step begins (a person at a terminal sees it at once) and its duration when it ends."""
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
    """Call ``ready`` until it says yes; after ``seconds`` raise LabError with the sentence ``what``."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise LabError(f"{what} (waited {seconds:.0f} s)")
        time.sleep(every)
