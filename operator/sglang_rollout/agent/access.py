"""Access checks for control calls: the rollout's token and the coordinator's term."""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from sglang_rollout.agent import events as ev
from sglang_rollout.agent.agent import Agent
from sglang_rollout.wire.ports import DEADLINE_HEADER, TERM_HEADER
from sglang_rollout.wire.reasons import RefusedError
from sglang_rollout.wire.trainer import ControlReply

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Model = TypeVar("_Model", bound=BaseModel)


def refuse(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return a refusal in SGLang's shape. The reason phrase repeats the message, because some clients print nothing else."""
    reason = " ".join(message.split()).encode("latin-1", "replace").decode("latin-1")[:200]
    body = ControlReply(success=False, message=message).model_dump(exclude_none=True)
    return web.json_response(body, status=status, reason=reason, headers=headers)


def check_token(request: web.Request, token: str, hint: str = "") -> None:
    """Raise RefusedError unless the call carries the rollout's token; ``hint`` ends the message for a call without a token."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not given:
        needed = f"{request.path}: control calls need 'Authorization: Bearer <token>'. Trainers call the fleet's URL, not an engine.{hint}"
        raise RefusedError(needed, status=401)
    if not hmac.compare_digest(given.strip().encode(), token.encode()):
        raise RefusedError(f"{request.path}: this token does not belong to this rollout.", status=403)


class Access:
    """Checks control calls before their handlers run."""

    def __init__(self, agent: Agent, token: str, hint: str = "") -> None:
        self._agent = agent
        self._token = token
        self._hint = hint

    def protected(self, handler: Handler) -> Handler:
        """Return a handler that refuses every caller but the coordinator with the highest term seen."""

        async def checked(request: web.Request) -> web.StreamResponse:
            check_token(request, self._token, self._hint)
            self._check_term(request)
            self._agent.heard_at = time.monotonic()
            return await handler(request)

        return checked

    def _check_term(self, request: web.Request) -> None:
        text = request.headers.get(TERM_HEADER, "")
        if not text.isascii() or not text.isdigit():
            raise RefusedError(f"{request.path}: the header {TERM_HEADER} must hold the coordinator's term, a number.")
        highest = self._agent.state.record.term
        if int(text) < highest:
            sentence = f"{request.path}: term {int(text)} is over; the coordinator of term {highest} leads."
            # The header lets a coordinator with a lost record choose a term above every term that agents have seen.
            raise RefusedError(sentence, status=409, headers={TERM_HEADER: str(highest)})
        self._agent.dispatch(ev.CoordinatorCalled(int(text)))


async def json_body(request: web.Request) -> dict[str, Any]:
    """Return the body as a JSON object; an empty body is {}."""
    raw = await request.read()
    if not raw.strip():
        return {}
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise RefusedError(f"{request.path}: the body is not JSON: {error}.") from None
    if not isinstance(body, dict):
        raise RefusedError(f"{request.path}: the body must be a JSON object, not {type(body).__name__}.")
    return body


async def message(request: web.Request, model: type[_Model]) -> _Model:
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
