"""Serve an aiohttp application at an endpoint: a TCP address or a Unix socket."""

from __future__ import annotations

from aiohttp import web

from sglang_rollout.proxy.address import Endpoint, UnixSocket


async def listen(runner: web.BaseRunner, endpoint: Endpoint) -> None:
    """Listen at ``endpoint``. A socket file that an earlier process left is replaced. Raises OSError."""
    if isinstance(endpoint, UnixSocket):
        await web.UnixSite(runner, endpoint.path).start()
    else:
        await web.TCPSite(runner, endpoint.host, endpoint.port).start()
