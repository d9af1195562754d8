"""The coordinator's HTTP application: limits, errors and the table of routes."""

from __future__ import annotations

import logging

from aiohttp import web

from sglang_rollout.coordinator.generate.routes import routes as data_routes
from sglang_rollout.coordinator.http.control import routes as control_routes
from sglang_rollout.coordinator.http.engine_calls import routes as engine_routes
from sglang_rollout.coordinator.http.info import routes as info_routes
from sglang_rollout.coordinator.http.parts import PARTS, Handler, Parts, refuse
from sglang_rollout.coordinator.update.ranks import Refusal
from sglang_rollout.sglang.api import DATA_PATHS
from sglang_rollout.sglang.refused_paths import find_refusal

log = logging.getLogger(__name__)

LARGEST_BODY = 8 * 2**20
"""A list of all tensors of the largest models is some megabytes; weights themselves never pass here."""


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
        why = find_refusal(request.path)
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
    """Return the application with all of its routes."""
    app = web.Application(middlewares=[guard], client_max_size=LARGEST_BODY)
    app[PARTS] = parts
    for routes in (info_routes, control_routes, engine_routes, data_routes):
        app.add_routes(routes)
    return app
