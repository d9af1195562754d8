"""Request parsing, replies and refusals of SGLang's HTTP server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

from sglang_rollout.testing.boot import Unavailable

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Invalid(Exception):
    """A body or query that SGLang's validation refuses. The message is shorter than SGLang's, the shape is the same."""

    def __init__(self, kind: str, *places: tuple[object, ...]) -> None:
        found = "\n".join(f"  {{'type': '{kind}', 'loc': {place}}}" for place in places)
        super().__init__(f"{len(places)} validation error{'s' if len(places) > 1 else ''}:\n{found}")


class Unhandled(Exception):
    """SGLang answers 500, because it does not handle an exception."""


async def body_of(request: web.Request, *needed: str) -> dict[str, Any]:
    """Return the JSON object of a request. Raises Invalid if the body or a needed field is missing."""
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
    """Yield parts until the client disconnects. Requests end with their client; control calls continue without it."""
    async for part in parts:
        if request.transport is None or request.transport.is_closing():
            return
        yield part


def always(document: Callable[[], Any]) -> Handler:
    """Return a route whose answer needs no scheduler."""

    async def handle(_: web.Request) -> web.Response:
        return json_reply(document())

    return handle


def json_reply(document: Any, status: int = 200) -> web.Response:
    """Return a JSON reply. SGLang's content type has no charset."""
    return web.Response(body=json.dumps(document).encode(), status=status, content_type="application/json")


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer refused requests with SGLang's bodies."""
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
