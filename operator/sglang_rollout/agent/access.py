"""Who may call an agent: the coordinator, which proves the engine's credential, with the highest term.

A co-located trainer calls each engine's own URL. :class:`Relay` forwards these calls to the coordinator, which decides about callers,
updates and memory. The coordinator's answers are returned unchanged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Self
from urllib.parse import quote

import aiohttp
from aiohttp import web

from sglang_rollout.agent import events as ev
from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.authorities import Authorities
from sglang_rollout.bounded import MESSAGE_BYTES, open_connector, open_session, read_answer
from sglang_rollout.credentials import Credentials
from sglang_rollout.internal.proven_calls import require_proof
from sglang_rollout.internal.requests import Handler, check_term, refuse
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.access import CALLER_HEADER, RELAYED_AUTHORIZATION_HEADER, RELAYED_CALLER_HEADER
from sglang_rollout.wire.ports import FLEET, FLEET_ENGINES, TERM_HEADER, VERSION_HEADER

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
"""SGLang's calls that trainers may send to an engine's URL."""
_CONNECT_SECONDS = 5.0
_RELAY_SECONDS = 600.0
_CHECK_SECONDS = 10.0
"""The coordinator waits up to 3 s for the pod of a new address."""
BODY_SECONDS = 60.0
"""Longest time in which a whole body arrives."""
MAX_RELAYED_BYTES = 64 * 2**20
"""Bytes of the bodies of all calls at a time: four of the largest size. The agent's container has 1 GiB, and a body is copied twice."""
_SMALL_BYTES = 4096
"""A body up to this size is read before the coordinator has decided about its caller, and is not counted: a page of memory a connection."""
_DISCONNECT_CHECK_SECONDS = 0.5
"""Interval between two checks of the client's connection."""
_SENT_HEADERS = ("Content-Type", "Origin", "Sec-Fetch-Site")
"""Headers of a call that the coordinator checks."""
_RELAYED_HEADERS = ("Content-Type", "Retry-After", "WWW-Authenticate", VERSION_HEADER)
_CALLER_ALLOWED = frozenset({204, 405})
"""Answers that allow a caller. A coordinator of an earlier release answers 405, and decides when it gets the call."""


def _close(response: web.Response) -> web.Response:
    """Let the connection end with this answer, because the body of its request is not read."""
    response.force_close()
    return response


class Access:
    """Checks control calls before their handlers run."""

    def __init__(self, agent: Agent, hint: str = "") -> None:
        self._agent = agent
        self._hint = hint

    def protected(self, handler: Handler) -> Handler:
        """Return a handler that refuses every caller but the coordinator with the highest term seen."""

        async def checked(request: web.Request) -> web.StreamResponse:
            require_proof(request, self._hint)
            self._agent.dispatch(ev.CoordinatorCalled(check_term(request, self._agent.state.record.term)))
            self._agent.last_call_at = time.monotonic()
            return await handler(request)

        return checked


class Relay:
    """Forwards calls to the coordinator of the fleet at ``url``. Use as an async context manager."""

    def __init__(self, url: str, *, engine: str, credentials: Credentials, authorities: Authorities | None = None) -> None:
        self._credentials = credentials
        self._authorities = authorities or Authorities()
        self._url = url.rstrip("/")
        self._base = f"{self._url}{FLEET_ENGINES}/{quote(engine, safe='')}"
        self._http: aiohttp.ClientSession | None = None
        self._bytes = 0
        """Bytes of the bodies that are held, or that may still arrive."""

    async def __aenter__(self) -> Self:
        # No limit: an abort must not wait for the call that it unblocks.
        self._http = open_session(connector=open_connector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    @property
    def hint(self) -> str:
        """End of the message that refuses any other call of a trainer."""
        return f" An engine's URL takes only {', '.join(RELAYED)}; the fleet's URL is {self._url}."

    def before(self, handler: Handler) -> Handler:
        """Return a handler that forwards trainers' calls; the coordinator's calls have a term and go to ``handler``."""

        async def relayed(request: web.Request) -> web.StreamResponse:
            return await (handler(request) if TERM_HEADER in request.headers else self._relay(request))

        return relayed

    async def _relay(self, request: web.Request) -> web.Response:
        """Forward a call whose caller is allowed. The body of any other caller is not read."""
        if not request.body_exists or (request.content_length is not None and request.content_length <= _SMALL_BYTES):
            return await self._read_and_forward(request)
        if (request.content_length or 0) > request.client_max_size:
            raise web.HTTPRequestEntityTooLarge(max_size=request.client_max_size, actual_size=request.content_length or 0)
        answer = await self._send("GET", request, None, _CHECK_SECONDS)
        if answer.status not in _CALLER_ALLOWED:
            return _close(answer)
        size = request.client_max_size if request.content_length is None else request.content_length
        if self._bytes + size > MAX_RELAYED_BYTES:
            message = f"{request.path}: the bodies of other calls fill the memory of this engine's agent. Try again."
            return _close(refuse(503, message, {"Retry-After": "1"}))
        self._bytes += size
        try:
            return await self._read_and_forward(request)
        finally:
            self._bytes -= size

    async def _read_and_forward(self, request: web.Request) -> web.Response:
        """Forward a call. If the client disconnects, close the connection to the coordinator too, which then ends the call."""
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await request.read()
        except TimeoutError:
            return _close(refuse(408, f"{request.path}: the body did not arrive within {BODY_SECONDS:g} s."))
        call = asyncio.create_task(self._send("POST", request, body, _RELAY_SECONDS), name=f"relay {request.path}")
        try:
            while not call.done():
                await asyncio.wait({call}, timeout=_DISCONNECT_CHECK_SECONDS)
                if request.transport is None or request.transport.is_closing():
                    log.warning("%s: the client disconnected before the fleet had answered.", request.path)
                    return refuse(499, f"{request.path}: the client disconnected.")
            return call.result()
        finally:
            call.cancel()

    async def _send(self, method: str, request: web.Request, body: bytes | None, seconds: float) -> web.Response:
        """Send a call to the coordinator, or with ``GET`` the question whether its caller is allowed."""
        if self._http is None:
            raise RuntimeError("Relay is used outside its 'async with' block")
        target = f"{self._base}{request.path}"
        headers = {}
        if body is not None:
            query = request.rel_url.raw_query_string
            target += f"{'?' if query else ''}{query}"
            headers = {name: value for name in _SENT_HEADERS if (value := request.headers.get(name, "")) and value.isascii()}
        # The gate sets this address. The credential proves that the agent of this engine names it.
        headers[RELAYED_CALLER_HEADER] = request.headers.get(CALLER_HEADER, "")
        if (token := request.headers.get("Authorization", "")) and token.isascii():
            headers[RELAYED_AUTHORIZATION_HEADER] = token
        headers |= self._credentials.header
        timeout = aiohttp.ClientTimeout(total=seconds, connect=_CONNECT_SECONDS)
        try:
            ssl = self._authorities.context()
            sent = self._http.request(method, target, data=body, headers=headers, allow_redirects=False, ssl=ssl, timeout=timeout)
            async with sent as answer:
                kept = {name: answer.headers[name] for name in _RELAYED_HEADERS if name in answer.headers}
                return web.Response(status=answer.status, reason=answer.reason, body=await read_answer(answer, MESSAGE_BYTES), headers=kept)
        except aiohttp.ClientConnectorCertificateError as error:
            return self._unanswered(request, f"has a certificate that this agent does not trust: {error.certificate_error}")
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            return self._unanswered(request, "cannot be reached, and only its coordinator decides about weights and memory. Try again")
        except TimeoutError:
            if body is None:
                return self._unanswered(request, f"has not answered within {seconds:g} s. Try again")
            result = f"has not answered within {seconds:g} s. GET {FLEET} there shows the result of the call"
            return self._unanswered(request, result, status=504)
        except (aiohttp.ClientError, OSError):
            result = f"broke the connection before it had answered. GET {FLEET} there shows the result of the call"
            return self._unanswered(request, result)

    def _unanswered(self, request: web.Request, problem: str, status: int = 503) -> web.Response:
        return refuse(status, f"{request.path}: the fleet's URL {self._url} {problem}.", {"Retry-After": "1"} if status == 503 else None)
