"""TCP keep-alive of all connections between the fleet's processes, and of trainers.

NAT, IPVS (900 s) and load balancers (350 s) forget connections on which nothing is sent, for example in a wait for a long answer.
Probes keep a connection in their tables, and find a lost peer.
"""

from __future__ import annotations

import os
import socket
from typing import Any

IDLE_SECONDS = 30
"""Silence after which a connection is probed."""
PROBE_SECONDS = 10
"""Time between two probes."""
PROBES = 3
"""Probes without an answer after which the peer counts as lost."""
LOST_SECONDS = IDLE_SECONDS + PROBES * PROBE_SECONDS
"""Time until a connection breaks if the peer acknowledges nothing of what was sent. Running requests have no other deadline."""

_WANTED = (
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", IDLE_SECONDS),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", PROBE_SECONDS),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", PROBES),
)
SERVER_OPTIONS = tuple((level, getattr(socket, name), value) for level, name, value in _WANTED if hasattr(socket, name))
"""Options of an accepted connection, as arguments of ``setsockopt``. Trainers may run on systems that lack some.

Without ``TCP_USER_TIMEOUT``: a client may stop to read a stream for minutes.
"""
CLIENT_OPTIONS = SERVER_OPTIONS + tuple(
    (socket.IPPROTO_TCP, getattr(socket, name), LOST_SECONDS * 1000) for name in ("TCP_USER_TIMEOUT",) if hasattr(socket, name)
)
"""Options of an opened connection. ``TCP_USER_TIMEOUT`` covers requests that were written and not acknowledged, which are not probed."""


def open_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket for a connection to an address of ``getaddrinfo``."""
    family, kind, protocol, *_ = address
    opened = socket.socket(family, kind, protocol)
    for option in CLIENT_OPTIONS:
        opened.setsockopt(*option)
    return opened


def keep_alive(listener: Any) -> None:
    """Let a listening socket probe the connections that it accepts, which inherit its options."""
    with socket.socket(fileno=os.dup(listener.fileno())) as same:  # event loops hide the methods of their sockets
        for option in SERVER_OPTIONS:
            same.setsockopt(*option)
