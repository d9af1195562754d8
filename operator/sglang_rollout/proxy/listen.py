"""Serve an aiohttp application at an endpoint: a TCP address or a Unix socket."""

from __future__ import annotations

from aiohttp import web

from sglang_rollout.keepalive import keep_alive
from sglang_rollout.proxy.address import Endpoint, UnixSocket


async def listen(runner: web.BaseRunner, endpoint: Endpoint) -> None:
    """Listen at ``endpoint``; ``::`` stands for all addresses. A socket file that an earlier process left is replaced. Raises OSError."""
    if isinstance(endpoint, UnixSocket):
        await web.UnixSite(runner, endpoint.path).start()
    else:
        # asyncio would listen at :: without IPv4, and fail if the kernel has no IPv6.
        site = web.TCPSite(runner, None if endpoint.host == "::" else endpoint.host, endpoint.port)
        await site.start()
        for each in getattr(site._server, "sockets", ()):
            keep_alive(each)
