"""``python -m e2e.chaos.slow PORT ENGINE_URL``: a proxy before a real engine that can hold a call back, as a stand-in can by itself.

It hears ``POST /stand_in/faults`` (kind ``slow``) and ``DELETE /stand_in/faults`` as stand-ins do, and passes on everything else.
An engine that ends in the middle of a call breaks the connection here, too.
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
    "/weights_checker": "check",
    "/update_weight_version": "version",
    "/continue_generation": "continue",
}
"""A stand-in's phase by the call that it is named after."""
FAULTS = "/stand_in/faults"
OWN = {"host", "content-length", "transfer-encoding", "connection"}
"""Headers that belong to one connection."""


class Proxy:
    """Passes calls on, one of a phase late if it was told so."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._late: dict[str, float] = {}

    async def keep_session(self, app: web.Application) -> Any:
        """The connections to the engine."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False) as self._session:
            yield

    async def told(self, request: web.Request) -> web.Response:
        """Be slow once, or not at all any more."""
        if request.method == "DELETE":
            self._late.clear()
        else:
            fault = await request.json()
            self._late[fault["phase"]] = float(fault["seconds"])
        return web.json_response({})

    async def passed_on(self, request: web.Request) -> web.StreamResponse:
        """The engine's answer."""
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
    app.router.add_route("*", FAULTS, proxy.told)
    app.router.add_route("*", "/{path:.*}", proxy.passed_on)
    # A client that leaves takes its request with it: SGLang aborts what nobody waits for.
    web.run_app(app, host="127.0.0.1", port=int(port), handler_cancellation=True, print=None)


if __name__ == "__main__":
    main()
