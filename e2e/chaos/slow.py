"""``python -m e2e.chaos.slow PORT ENGINE_URL``: a proxy before a real engine that can delay a call, as a stand-in can.

It answers ``POST /stand_in/faults`` (kind ``slow``) and ``DELETE /stand_in/faults`` as stand-ins do, and forwards all other calls.
If the engine ends during a call, the proxy closes the client's connection.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import aiohttp
from aiohttp import web

PATHS = {
    "/pause_generation": "pause",
    "/begin_weight_update": "begin",
    "/update_weights_from_distributed": "update",
    "/update_weights_from_tensor": "load",
    "/weights_checker": "check",
    "/update_weight_version": "version",
    "/continue_generation": "continue",
}
"""A stand-in's phase, by the path of its call."""
FAULTS = "/stand_in/faults"
OWN = {"host", "content-length", "transfer-encoding", "connection"}
"""Headers that belong to one connection."""


class Proxy:
    """Forwards calls, and delays one call of each armed phase."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._late: dict[str, float] = {}

    async def keep_session(self, app: web.Application) -> Any:
        """Keep the connections to the engine open while the proxy runs."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False) as self._session:
            yield

    async def arm(self, request: web.Request) -> web.Response:
        """Delay the next call of a phase, or disarm all delays."""
        if request.method == "DELETE":
            self._late.clear()
        else:
            fault = await request.json()
            self._late[fault["phase"]] = float(fault["seconds"])
        return web.json_response({})

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Forward a call and return the engine's answer."""
        data = await request.read()
        await asyncio.sleep(self._late.pop(PATHS.get(request.path, ""), 0.0))
        headers = {name: value for name, value in request.headers.items() if name.lower() not in OWN}
        try:
            async with self._session.request(request.method, self._target + request.path_qs, data=data, headers=headers) as reply:
                kept = {name: value for name, value in reply.headers.items() if name.lower() not in OWN}
                return web.Response(status=reply.status, headers=kept, body=await reply.read())
        except aiohttp.ClientError:
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=502)


def main() -> None:
    """Serve until killed."""
    port, target = sys.argv[1:]
    proxy = Proxy(target)
    app = web.Application(client_max_size=1 << 30)
    app.cleanup_ctx.append(proxy.keep_session)
    app.router.add_route("*", FAULTS, proxy.arm)
    app.router.add_route("*", "/{path:.*}", proxy.forward)
    # SGLang aborts a request when its client disconnects, so the request to the engine must end with the client's.
    web.run_app(app, host="127.0.0.1", port=int(port), handler_cancellation=True, print=None)


if __name__ == "__main__":
    main()
