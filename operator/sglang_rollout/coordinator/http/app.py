"""HTTP application of the coordinator: objects that the routes share, callers, limits and errors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from aiohttp import web
from prometheus_client.aiohttp import make_aiohttp_handler

from sglang_rollout.coordinator.aborts import Aborts
from sglang_rollout.coordinator.agents import Agents
from sglang_rollout.coordinator.callers.check import CallerCheck
from sglang_rollout.coordinator.callers.pods import Caller
from sglang_rollout.coordinator.driver import Driver
from sglang_rollout.coordinator.engine_infos import EngineInfos
from sglang_rollout.coordinator.http.audit import CLIENT_LEFT, AuditLog
from sglang_rollout.coordinator.metrics import Metrics
from sglang_rollout.coordinator.smg import SmgWorkers
from sglang_rollout.coordinator.update.machine import Machine
from sglang_rollout.coordinator.update.requests import Answer, Request
from sglang_rollout.coordinator.wanted_engines import WantedEngines
from sglang_rollout.sglang.api import DATA_PATHS, ControlCall
from sglang_rollout.sglang.refused_paths import find_refusal
from sglang_rollout.wire.access import POD_PATHS
from sglang_rollout.wire.ports import FLEET_METRICS, VERSION_HEADER
from sglang_rollout.wire.reasons import GateReason, Refusal, RefusalCode, RefusedError, reason_phrase
from sglang_rollout.wire.trainer import ControlReply

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Parts:
    """Objects that the routes need."""

    name: str
    namespace: str
    public_url: str
    generate_url: str
    """URL that serves data paths only, or the public URL if there is no other."""
    driver: Driver
    agents: Agents
    wanted_engines: WantedEngines
    workers: SmgWorkers
    infos: EngineInfos
    metrics: Metrics
    callers: CallerCheck
    aborts: Aborts

    @property
    def machine(self) -> Machine:
        """The state machine. Raises RefusedError until the record has been read."""
        machine = self.driver.machine
        if machine is None:
            raise RefusedError("The coordinator has just started and cannot read its record yet. Try again.", status=503)
        return machine

    def is_served(self, name: str) -> bool:
        """Return True if requests at the URL reach this engine: its gate is open, and smg sends requests to it."""
        return self.machine.fleet.engines[name].serving and self.wanted_engines.url(name) in self.workers.routed

    async def ask(self, asked: Request, caller: str) -> Answer:
        """Ask the state machine. If that opens gates, the answer waits until requests reach those engines: callers generate at once."""
        before = self._serving()
        answer = await self.driver.ask(asked, caller)
        if opened := self._serving() - before:
            await self.workers.take_up(opened)
        return answer

    def _serving(self) -> frozenset[str]:
        """Return the URLs of engines whose gates are open."""
        urls = (self.wanted_engines.url(name) for name, engine in self.machine.fleet.engines.items() if engine.serving)
        return frozenset(filter(None, urls))


PARTS = web.AppKey("parts", Parts)
AUDIT = web.AppKey("audit", AuditLog)
CALLER = web.RequestKey("caller", Caller)
"""Who sends a request."""


def refuse(status: int, message: str, fleet: dict[str, object] | None = None) -> web.Response:
    """Return a refusal with the code that belongs to the status."""
    return fail(status, message, fleet, RefusalCode.from_status(status))


def fail(status: int, message: str, fleet: dict[str, object] | None, code: RefusalCode | GateReason | None) -> web.Response:
    """Return a failure in SGLang's shape. The status line has the message too, because clients print that line and drop the body."""
    body = ControlReply(success=False, message=message, code=code, fleet=fleet)
    headers = {"Retry-After": "1"} if status == 503 else {}
    return web.json_response(body.model_dump(mode="json", exclude_none=True), status=status, reason=reason_phrase(message), headers=headers)


MAX_BODY_BYTES = 8 * 2**20
"""Largest body of a control call. The tensor list of the largest models has some megabytes; weights never pass here."""

BODY_SECONDS = 60.0
"""Longest time in which a whole body arrives."""


@web.middleware
async def check_caller(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse a caller before its body is read, without a call to another process."""
    began, status, version = time.monotonic(), CLIENT_LEFT, None
    try:
        verdict = await request.app[PARTS].callers.check(request.path, request.headers, request.remote)
        if isinstance(verdict, Refusal):
            answer: web.StreamResponse = _refuse_caller(request, verdict)
        else:
            request[CALLER] = verdict
            answer = await handler(request)
        status, version = answer.status, answer.headers.get(VERSION_HEADER)
        return answer
    finally:
        request.app[AUDIT].note(request, request.get(CALLER), status, time.monotonic() - began, version)


def _refuse_caller(request: web.Request, refusal: Refusal) -> web.Response:
    """Return the refusal of a control call."""
    message = f"{request.path}: {refusal.message}"
    body = ControlReply(success=False, message=message, code=refusal.code).model_dump(mode="json", exclude_none=True)
    response = refusal_response(refusal, message, body)
    response.force_close()  # the body is not read
    return response


def refusal_response(refusal: Refusal, message: str, body: dict[str, object]) -> web.Response:
    """Return a refusal of a caller with the headers that belong to its code."""
    headers = {}
    if refusal.code is RefusalCode.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = "Bearer"
    if refusal.code is RefusalCode.UNAVAILABLE:
        headers["Retry-After"] = "1"
    return web.json_response(body, status=refusal.status, reason=reason_phrase(message), headers=headers)


@web.middleware
async def handle_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse a body that is too large before it is read, and turn every error into a reply with a message."""
    if request.content_length is not None and request.content_length > MAX_BODY_BYTES:
        return _too_large(request.content_length)
    try:
        _refuse_web_pages(request)
        await _receive_body(request)
        return await handler(request)
    except RefusedError as refusal:
        return fail(refusal.status, str(refusal), refusal.fleet or None, refusal.refusal.code)
    except web.HTTPException as error:
        return _http_error(request, error)
    except (ConnectionError, TimeoutError) as error:
        log.warning("%s %s: %s", request.method, request.path, error)
        return refuse(502, f"{request.path}: {str(error) or type(error).__name__}")
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return refuse(500, f"{request.path} failed in the coordinator; its log has the reason.")


def _refuse_web_pages(request: web.Request) -> None:
    """Raise RefusedError for a control call that a page in a browser can send without its user's knowledge.

    Browsers add ``Origin`` to every POST and to calls across sites, and send a page's JSON across sites only after a check that fails here.
    """
    flushes = request.path == ControlCall.FLUSH_CACHE.path
    is_served = request.match_info.http_exception is None
    if not is_served or (request.method in {"GET", "HEAD"} and not flushes):
        return
    if "Origin" in request.headers or request.headers.get("Sec-Fetch-Site", "none") != "none":
        raise RefusedError(f"{request.path}: control calls from web pages are refused. Call it from a program.", status=403)
    kind = request.content_type
    # SGLang ignores the body of flush_cache. Some trainers send bodies without a type, and SGLang refuses all other types as well.
    if request.body_exists and "Content-Type" in request.headers and not flushes and not kind.endswith(("/json", "+json")):
        raise RefusedError(f"{request.path}: Content-Type {kind} is not accepted: send JSON as application/json.", status=415)


async def _receive_body(request: web.Request) -> None:
    """Read the body, which the handler then gets at once."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            await request.read()
    except TimeoutError:
        raise RefusedError(f"{request.path}: the body did not arrive within {BODY_SECONDS:g} s.", status=408) from None


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return _too_large(None)
    if isinstance(error, web.HTTPNotFound):
        reason = find_refusal(request.path)
        return refuse(501, reason) if reason is not None else refuse(404, _unknown_path(request))
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = " or ".join(sorted(error.allowed_methods - {"HEAD"}))
        return refuse(405, f"{request.method} {request.path}: use {allowed}.")
    raise error


def _too_large(length: int | None) -> web.Response:
    size = f"a body of {length} bytes" if length is not None else "this body"
    response = refuse(413, f"{size} is too large for a control call (limit {MAX_BODY_BYTES}): tensors go through the process group.")
    # The rest of the body is not read, because it may have any size.
    response.force_close()
    return response


def _unknown_path(request: web.Request) -> str:
    paths = {route.resource.canonical for route in request.app.router.routes() if route.resource is not None}
    control = ", ".join(sorted(paths))
    return (
        f"{request.path} is no path of this URL, which serves a fleet of SGLang engines. Data: {', '.join(DATA_PATHS)}. Control: {control}."
    )


async def _end_audit(app: web.Application) -> None:
    app[AUDIT].write_omitted()


def make_app(parts: Parts, routes: Iterable[web.RouteDef]) -> web.Application:
    """Return the application with these routes and the metrics."""
    app = web.Application(middlewares=[check_caller, handle_errors], client_max_size=MAX_BODY_BYTES)
    app[PARTS] = parts
    app[AUDIT] = AuditLog()
    app.on_cleanup.append(_end_audit)
    app.router.add_get(FLEET_METRICS, make_aiohttp_handler(parts.metrics.registry))
    app.add_routes(routes)
    return app


def make_pod_app(parts: Parts, routes: Iterable[web.RouteDef]) -> web.Application:
    """Return the application for the other containers of the router pod, which are no callers: it has only their paths.

    These containers process untrusted requests, so the coordinator ignores their caller headers.
    """
    app = web.Application(middlewares=[handle_errors], client_max_size=MAX_BODY_BYTES)
    app[PARTS] = parts
    app.add_routes(route for route in routes if route.path in POD_PATHS)
    return app
