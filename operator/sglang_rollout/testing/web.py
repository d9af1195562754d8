"""How SGLang's HTTP server reads bodies, answers and refuses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

from sglang_rollout.testing.life import Unavailable

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Invalid(Exception):
    """A body or query that SGLang's validation refuses; the sentence is shorter than SGLang's, the shape is the same."""

    def __init__(self, kind: str, *places: tuple[object, ...]) -> None:
        found = "\n".join(f"  {{'type': '{kind}', 'loc': {place}}}" for place in places)
        super().__init__(f"{len(places)} validation error{'s' if len(places) > 1 else ''}:\n{found}")


class Unhandled(Exception):
    """SGLang fails on the request with an exception that it does not handle: 500."""


async def body_of(request: web.Request, *needed: str) -> dict[str, Any]:
    """The JSON object of a request; a missing body or field is refused."""
    raw = await request.read()
    if not raw:
        raise Invalid("missing", ("body",))
    try:
        body = json.loads(raw)
    except ValueError:
        raise Invalid("json_invalid", ("body", 0)) from None
    if not isinstance(body, dict):
        raise Invalid("model_attributes_type", ("body",))
    missing = [("body", name) for name in needed if name not in body]
    if missing:
        raise Invalid("missing", *missing)
    return body


async def while_connected(request: web.Request, parts: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    """A client that is gone ends its requests; control calls go on without their client."""
    async for part in parts:
        if request.transport is None or request.transport.is_closing():
            return
        yield part


def always(document: Callable[[], Any]) -> Handler:
    """A route whose answer needs no scheduler."""

    async def handle(_: web.Request) -> web.Response:
        return json_reply(document())

    return handle


def json_reply(document: Any, status: int = 200) -> web.Response:
    """A JSON answer. SGLang's content type has no charset."""
    return web.Response(body=json.dumps(document).encode(), status=status, content_type="application/json")


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """SGLang's bodies for what it refuses."""
    try:
        return await handler(request)
    except Invalid as error:
        return json_reply({"object": "error", "message": str(error), "type": "Bad Request", "param": None, "code": 400}, 400)
    except Unavailable:
        return json_reply({"error": {"message": "The request queue is full."}}, 503)
    except Unhandled:
        return web.Response(text="Internal Server Error", status=500)
    except web.HTTPNotFound:
        return json_reply({"detail": "Not Found"}, 404)
    except web.HTTPMethodNotAllowed:
        return json_reply({"detail": "Method Not Allowed"}, 405)
