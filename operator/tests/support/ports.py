"""Loopback ports for servers that tests start."""

from __future__ import annotations

import itertools
import os
import socket

import pytest


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6: nothing can listen on ::1")

_COUNT = 350
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_FIRST = 24200 + _COUNT * (_WORKER % 3)  # each worker of `pytest -n` has its own ports
_turns = itertools.count(os.getpid() * 97)


def free_port(row: int = 1) -> int:
    """Return the first of ``row`` consecutive free loopback ports that recent calls did not return, so that a server may start there later.

    The ports are below the ephemeral range, so no connection uses one meanwhile.

    Raises:
        OSError: There are no such ports.
    """
    found: list[int] = []
    for turn in itertools.islice(_turns, _COUNT + row):
        port = _FIRST + turn % _COUNT
        found = found if found and port == found[-1] + 1 else []
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == row:
            return found[0]
    raise OSError(f"no {row} free ports in a row from {_FIRST} to {_FIRST + _COUNT - 1}")
