"""Relay for calls of a co-located trainer, which calls each engine's own URL without a token.

The coordinator decides about updates and memory, so the relay forwards these calls to it and returns its answers unchanged."""

from __future__ import annotations

import asyncio
import logging
from typing import Self
from urllib.parse import quote

import aiohttp
from aiohttp import web

from sglang_rollout.agent.access import Handler, refuse
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.ports import FLEET, FLEET_ENGINES, VERSION_HEADER

log = logging.getLogger(__name__)

RELAYED = (
    ControlCall.RELEASE_MEMORY,
    ControlCall.RESUME_MEMORY,
    ControlCall.FLUSH_CACHE,
    ControlCall.ABORT_REQUEST,
    ControlCall.BEGIN_UPDATE,
    ControlCall.UPDATE_TENSOR,
    ControlCall.END_UPDATE,
    ControlCall.SET_VERSION,
)
"""SGLang's calls that an engine's URL accepts without a token."""

CONNECT_DEADLINE = 5.0
CALL_DEADLINE = 600.0
_GONE_AFTER = 0.5
"""Seconds between two checks of the client's connection."""
_KEPT_HEADERS = ("Content-Type", "Retry-After", VERSION_HEADER)


class Relay:
    """Forwards calls to the coordinator of the fleet at ``url``. Use as an async context manager."""

    def __init__(self, url: str, *, engine: str) -> None:
        self._url = url.rstrip("/")
        self._base = f"{self._url}{FLEET_ENGINES}/{quote(engine, safe='')}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=CALL_DEADLINE, connect=CONNECT_DEADLINE)
        # No limit: an abort must not wait for the call that it unblocks.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def hint(self) -> str:
        """End of the message that refuses any other call without a token."""
        return f" Without one, an engine's URL takes only {', '.join(RELAYED)}; the fleet's URL is {self._url}."

    def before(self, handler: Handler) -> Handler:
        """Return a handler that forwards calls without a token; the coordinator's calls carry a token and go to ``handler``."""

        async def taken(request: web.Request) -> web.StreamResponse:
            return await (handler(request) if "Authorization" in request.headers else self._hand_over(request))

        return taken

    async def _hand_over(self, request: web.Request) -> web.Response:
        """Forward a call. If the client disconnects, close the connection to the coordinator too, which then ends the call."""
        call = asyncio.create_task(self._asked(request, await request.read()), name=f"relay {request.path}")
        try:
            while not call.done():
                await asyncio.wait({call}, timeout=_GONE_AFTER)
                if request.transport is None or request.transport.is_closing():
                    log.warning("%s: the client went away before the fleet had answered.", request.path)
                    return refuse(499, f"{request.path}: the client went away.")  # nobody reads it
            return call.result()
        finally:
            call.cancel()

    async def _asked(self, request: web.Request, body: bytes) -> web.Response:
        if self._session is None:
            raise RuntimeError("Relay is used outside its 'async with' block")
        query = request.rel_url.raw_query_string
        target = f"{self._base}{request.path}{'?' if query else ''}{query}"
        headers = {"Content-Type": request.headers["Content-Type"]} if "Content-Type" in request.headers else {}
        try:
            async with self._session.post(target, data=body, headers=headers, allow_redirects=False) as answer:
                kept = {name: answer.headers[name] for name in _KEPT_HEADERS if name in answer.headers}
                return web.Response(status=answer.status, reason=answer.reason, body=await answer.read(), headers=kept)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            return self._away(request, "cannot be reached, and only its coordinator decides about weights and memory. Try again")
        except TimeoutError:
            return self._away(request, f"has not answered within {CALL_DEADLINE:g} s. GET {FLEET} there tells what came of the call", 504)
        except (aiohttp.ClientError, OSError):
            return self._away(request, f"broke the connection before it had answered. GET {FLEET} there tells what came of the call")

    def _away(self, request: web.Request, what: str, status: int = 503) -> web.Response:
        return refuse(status, f"{request.path}: the fleet's URL {self._url} {what}.", {"Retry-After": "1"} if status == 503 else None)
