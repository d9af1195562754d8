"""The coordinator's HTTP application: limits, errors and the table of routes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from sglang_rollout.fleet import refused
from sglang_rollout.fleet.agents import Agents
from sglang_rollout.fleet.compat import reason_phrase
from sglang_rollout.fleet.driver import Driver
from sglang_rollout.fleet.infos import Infos
from sglang_rollout.fleet.members import Members
from sglang_rollout.fleet.metrics import Metrics
from sglang_rollout.fleet.ranks import Refusal
from sglang_rollout.fleet.router import Router
from sglang_rollout.fleet.smg import Smg
from sglang_rollout.fleet.update.machine import Machine
from sglang_rollout.wire.ports import DATA_PATHS
from sglang_rollout.wire.trainer import ControlReply

log = logging.getLogger(__name__)

LARGEST_BODY = 8 * 2**20
"""A list of all tensors of the largest models is some megabytes; weights themselves never pass here."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Parts:
    """What the routes need."""

    name: str
    namespace: str
    public_url: str
    driver: Driver
    agents: Agents
    members: Members
    router: Router
    smg: Smg
    infos: Infos
    metrics: Metrics

    @property
    def machine(self) -> Machine:
        """The state machine; refuses while the record cannot be read."""
        machine = self.driver.machine
        if machine is None:
            raise Refusal("The coordinator has just started and cannot read its record yet. Try again.", status=503)
        return machine


PARTS = web.AppKey("parts", Parts)


def refuse(status: int, message: str, fleet: dict[str, object] | None = None) -> web.Response:
    """A refusal in SGLang's shape, with the reason in the status line too: clients print that and drop the body."""
    body = ControlReply(success=False, message=message, fleet=fleet)
    headers = {"Retry-After": "1"} if status == 503 else {}
    return web.json_response(body.model_dump(mode="json", exclude_none=True), status=status, reason=reason_phrase(message), headers=headers)


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what is too large before it is read, and turn every error into a sentence."""
    if request.content_length is not None and request.content_length > LARGEST_BODY and request.path not in DATA_PATHS:
        return _too_large(request.content_length)
    try:
        return await handler(request)
    except Refusal as refusal:
        return refuse(refusal.status, str(refusal), refusal.fleet or None)
    except web.HTTPException as error:
        return _http_error(request, error)
    except (ConnectionError, TimeoutError) as error:
        log.warning("%s %s: %s", request.method, request.path, error)
        return refuse(502, f"{request.path}: {str(error) or type(error).__name__}")
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return refuse(500, f"{request.path} failed in the coordinator; its log says why.")


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return _too_large(None)
    if isinstance(error, web.HTTPNotFound):
        why = refused.reason(request.path)
        return refuse(501, why) if why is not None else refuse(404, _unknown(request))
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = " or ".join(sorted(error.allowed_methods - {"HEAD"}))
        return refuse(405, f"{request.method} {request.path}: use {allowed}.")
    raise error


def _too_large(length: int | None) -> web.Response:
    size = f"{length} bytes" if length is not None else "this body"
    sentence = f"{size} are too many for a control call (limit {LARGEST_BODY}): tensors go through the group."
    response = refuse(413, sentence)
    # What is left of the body is not read: it may be anything.
    response.force_close()
    return response


def _unknown(request: web.Request) -> str:
    paths = {route.resource.canonical for route in request.app.router.routes() if route.resource is not None}
    control = ", ".join(sorted(paths - set(DATA_PATHS)))
    return (
        f"{request.path} is no path of this URL, which serves a fleet of SGLang engines. Data: {', '.join(DATA_PATHS)}. Control: {control}."
    )


def make_app(parts: Parts) -> web.Application:
    """The application with all of its routes."""
    # Imported here: the route modules need what is defined above.
    from sglang_rollout.fleet import routes_control, routes_data, routes_engine, routes_info  # noqa: PLC0415

    app = web.Application(middlewares=[guard], client_max_size=LARGEST_BODY)
    app[PARTS] = parts
    app.add_routes(routes_info.routes)
    app.add_routes(routes_control.routes)
    app.add_routes(routes_engine.routes)
    app.add_routes(routes_data.routes)
    return app
