"""SGLang's JSON answers, and one exception for each shape in which it refuses a request."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web


class Unhandled(Exception):
    """SGLang answers 500, because it does not handle an exception."""


class BadRequest(Exception):
    """SGLang, or the plug-in, refuses a request that SGLang has parsed. The path gives the answer its shape."""


class Undecodable(Exception):
    """SGLang's decoder finds a value of a wrong type, or an unknown sampling parameter."""

    @property
    def body(self) -> dict[str, Any]:
        """The answer."""
        return {"error": str(self)}


class Invalid(Exception):
    """A body or query that SGLang's validation refuses. The message is shorter than SGLang's, the shape is the same."""

    def __init__(self, kind: str, *places: tuple[object, ...]) -> None:
        found = "\n".join(f"  {{'type': '{kind}', 'loc': {place}}}" for place in places)
        super().__init__(f"{len(places)} validation error{'s' if len(places) > 1 else ''}:\n{found}")

    @property
    def body(self) -> dict[str, Any]:
        """The answer."""
        return error_object(str(self), "Bad Request")


class RefusedBody(Exception):
    """The plug-in refuses the JSON of a request, before SGLang validates it."""

    @property
    def body(self) -> dict[str, Any]:
        """The answer."""
        return error_object(str(self), "400")


def error_object(message: str, kind: str) -> dict[str, Any]:
    """Return SGLang's error in OpenAI's shape."""
    return {"object": "error", "message": message, "type": kind, "param": None, "code": 400}


def error_event(message: str) -> dict[str, Any]:
    """Return the event that ends a stream of ``/generate``."""
    return {"error": {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}}


def json_reply(document: Any, status: int = 200) -> web.Response:
    """Return a JSON reply. SGLang's content type has no charset."""
    return web.Response(body=json.dumps(document).encode(), status=status, content_type="application/json")


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
