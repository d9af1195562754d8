"""Requests of the coordinator to an agent or to the weight store: the term, the message, and refusals. ``proven_calls`` has the proofs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from sglang_rollout.internal.refusals import REFUSAL_LOG
from sglang_rollout.json_text import load_json
from sglang_rollout.wire.ports import DEADLINE_HEADER, TERM_HEADER
from sglang_rollout.wire.reasons import RefusedError, reason_phrase
from sglang_rollout.wire.trainer import ControlReply

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Model = TypeVar("_Model", bound=BaseModel)


def refuse(status: int, message: str, headers: Mapping[str, str] | None = None, *, code: str | None = None) -> web.Response:
    """Return a refusal in SGLang's shape. The reason phrase repeats the message, because some clients print nothing else."""
    body = ControlReply(success=False, message=message, code=code).model_dump(exclude_none=True)
    return web.json_response(body, status=status, reason=reason_phrase(message), headers=headers)


@web.middleware
async def answer_refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a RefusedError in SGLang's shape, and log a refused credential."""
    try:
        return await handler(request)
    except RefusedError as error:
        request.app[REFUSAL_LOG].note(request, error.status)
        return refuse(error.status, str(error), error.headers)


def check_term(request: web.Request, highest: int) -> int:
    """Return the term of a coordinator's call.

    Args:
        request: The call.
        highest: Highest term that this process has seen.

    Raises:
        RefusedError: The call has no term, or a lower term.
    """
    text = request.headers.get(TERM_HEADER, "")
    if not text.isascii() or not text.isdigit():
        raise RefusedError(f"{request.path}: the header {TERM_HEADER} must hold the coordinator's term, a number.")
    if int(text) < highest:
        message = f"{request.path}: term {int(text)} is over; the coordinator of term {highest} leads."
        # The header lets a coordinator with a lost record choose a term above every term that was seen.
        raise RefusedError(message, status=409, headers={TERM_HEADER: str(highest)})
    return int(text)


async def json_body(request: web.Request) -> dict[str, Any]:
    """Return the body as a JSON object; an empty body is {}."""
    raw = await request.read()
    if not raw.strip():
        return {}
    try:
        body = load_json(raw)
    except ValueError as error:
        raise RefusedError(f"{request.path}: the body is not JSON: {error}.") from None
    if not isinstance(body, dict):
        raise RefusedError(f"{request.path}: the body must be a JSON object, not {type(body).__name__}.")
    return body


async def read_message(request: web.Request, model: type[_Model]) -> _Model:
    """Return the body as a message of this model."""
    try:
        return model.model_validate(await json_body(request))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise RefusedError(f"{request.path}: {where}: {first['msg']}.") from None


def deadline_of(request: web.Request, default: float) -> float:
    """Return the caller's deadline in seconds."""
    text = request.headers.get(DEADLINE_HEADER)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86400:
        raise RefusedError(f"{request.path}: the header {DEADLINE_HEADER} must hold seconds, from 0 to 86400, not {text!r}.")
    return seconds
