"""Loopback ports for servers that tests start."""

from __future__ import annotations

import fcntl
import itertools
import os
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import IO

import pytest


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6: nothing can listen on ::1")

_WINDOW = 350
"""Ports that one test process uses."""
_FIRST, _LAST = 24200, 29999
"""Below the ephemeral ports, and below those of a fleet on one machine."""
_locks: list[IO[str]] = []


@cache
def _claim_window() -> int:
    """Return the first port of a window that no other test process on this machine uses until this process ends."""
    for first in range(_FIRST, _LAST - _WINDOW + 2, _WINDOW):
        with suppress(OSError):  # another process, perhaps of another user, holds the lock
            lock = (Path(gettempdir()) / f"sglang-rollout-test-ports-{first}").open("w")
            _locks.append(lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return first
    raise OSError(f"other test processes use all ports from {_FIRST} to {_LAST}")


_turns = itertools.count(os.getpid() * 97)


def free_port(row: int = 1) -> int:
    """Return the first of ``row`` consecutive free loopback ports that recent calls did not return, so that a server may start there later.

    The ports are below the ephemeral range, so no connection uses one meanwhile.

    Raises:
        OSError: There are no such ports.
    """
    found: list[int] = []
    first = _claim_window()
    for turn in itertools.islice(_turns, _WINDOW + row):
        port = first + turn % _WINDOW
        found = found if found and port == found[-1] + 1 else []
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == row:
            return found[0]
    raise OSError(f"no {row} free ports in a row from {first} to {first + _WINDOW - 1}")
