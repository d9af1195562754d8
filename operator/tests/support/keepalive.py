"""The timers of TCP connections, as the kernel has them."""

from __future__ import annotations

from pathlib import Path

TICKS = 100
"""Ticks of the kernel's timers in a second, as /proc shows them."""
ESTABLISHED, LISTENING = "01", "0A"
_KEEPALIVE = "02"


def read_connections(port: int) -> list[tuple[bool, float | None]]:
    """Return both ends of each open connection to a local port.

    Returns:
        Whether it is the listener's end, and the seconds until the next probe; None if no probe is due.
    """
    found: list[tuple[bool, float | None]] = []
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(file).read_text().splitlines()[1:]:
            _, local, remote, state, _, timer = line.split()[:6]
            ports = [int(each.rsplit(":", 1)[1], 16) for each in (local, remote)]
            if state == ESTABLISHED and port in ports:
                kind, at = timer.split(":")
                found.append((ports[0] == port, int(at, 16) / TICKS if kind == _KEEPALIVE else None))
    return found


def assert_both_ends_are_probed(port: int) -> None:
    """Assert that both ends of all connections to a local port are probed before a load balancer or NAT forgets them."""
    found = read_connections(port)
    assert {is_server for is_server, _ in found} == {True, False}, found
    assert all(seconds is not None and seconds <= 60 for _, seconds in found), found
