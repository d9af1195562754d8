"""The batch server's connections to smg and to engines."""

from __future__ import annotations

import socket

import pytest

from sglang_rollout.batches.client import open_socket


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_connection_to_a_lost_node_breaks_within_about_a_minute(family: socket.AddressFamily) -> None:
    with open_socket((family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 1))) as opened:
        assert opened.family is family
        assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        idle, interval, count, unacknowledged = (opened.getsockopt(socket.IPPROTO_TCP, option) for option in options)
        assert idle + interval * count == 60
        assert unacknowledged == 60_000
