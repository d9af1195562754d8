"""Routes that generate: ``/generate``, ``/v1/completions`` and ``/v1/chat/completions``, as one answer or as a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from aiohttp import web

from sglang_rollout.sglang.api import CHAT_COMPLETIONS, COMPLETIONS, GENERATE
from sglang_rollout.testing import openai
from sglang_rollout.testing.boot import Boot
from sglang_rollout.testing.decode import check_types
from sglang_rollout.testing.faults import Phase
from sglang_rollout.testing.plugin import RequestCheck
from sglang_rollout.testing.replies import BadRequest, body_of, error_event, error_object, json_reply
from sglang_rollout.testing.samples import Prompt, Wanted, parse, produce

Reply = Mapping[str, Any]
Events = Callable[[int, Reply, Reply | None], list[Any]]
"""Returns the events of a stream for a prompt's number, its reply, and the reply before it."""
_DONE = b"data: [DONE]\n\n"


class Generation:
    """The routes of one boot."""

    def __init__(self, boot: Boot) -> None:
        self._boot = boot
        self._check = RequestCheck(boot)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        routes = [web.post(path, self._complete) for path in (COMPLETIONS, CHAT_COMPLETIONS)]
        return [web.post(GENERATE, self._generate), web.put(GENERATE, self._generate), *routes]

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await body_of(request)
        self._check.check_body(request.path, body)
        check_types(body)
        try:
            wanted = self._read(request.path, body)
        except BadRequest as error:
            if body.get("stream"):
                return await _stream_error(request, str(error))
            return json_reply({"error": {"message": str(error)}}, 400)
        await self._boot.reach(Phase.GENERATE)
        if wanted.stream:

            def number(index: int, reply: Reply, _: Reply | None) -> list[Any]:
                return [reply if wanted.single else {**reply, "index": index}]

            return await self._stream(request, wanted, number)
        replies = await self._replies(request, wanted)
        return json_reply(replies[0] if wanted.single else replies)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body, path = await body_of(request), request.path
        self._check.check_body(path, body)
        try:
            wanted = self._read(path, openai.to_generate(path, body))
        except BadRequest as error:
            return json_reply(error_object(str(error), "BadRequestError"), 400)
        await self._boot.reach(Phase.GENERATE)
        model = str(body.get("model") or self._boot.model_path)
        if wanted.stream:
            return await self._stream(request, wanted, lambda *parts: openai.events(path, model, *parts))
        samples = max(int(body.get("n") or 1), 1)
        return json_reply(openai.answer(path, model, await self._replies(request, wanted), samples))

    def _read(self, path: str, fields: Mapping[str, Any]) -> Wanted:
        """Return the prompts of a request that passes the plug-in's rules. Raises BadRequest."""
        self._check.check_request(path, fields)
        wanted = parse(self._boot, fields)
        for prompt in wanted.prompts:
            self._check.check_tokens(prompt.ids, fields.get("session_params"))
        return wanted

    async def _replies(self, request: web.Request, wanted: Wanted) -> list[dict[str, Any]]:
        return await asyncio.gather(*(self._last(request, prompt) for prompt in wanted.prompts))

    async def _last(self, request: web.Request, prompt: Prompt) -> dict[str, Any]:
        last: dict[str, Any] = {}
        async for reply in while_connected(request, produce(self._boot, prompt)):
            last = reply
        return last

    async def _stream(self, request: web.Request, wanted: Wanted, events: Events) -> web.StreamResponse:
        stream = await _open_stream(request)

        async def send(index: int, prompt: Prompt) -> None:
            before = None
            async for reply in while_connected(request, produce(self._boot, prompt)):
                for event in events(index, reply, before):
                    await stream.write(_encode(event))
                before = reply

        await asyncio.gather(*(send(index, prompt) for index, prompt in enumerate(wanted.prompts)))
        await stream.write(_DONE)
        return stream


async def _open_stream(request: web.Request) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await stream.prepare(request)
    return stream


async def _stream_error(request: web.Request, message: str) -> web.StreamResponse:
    stream = await _open_stream(request)
    await stream.write(_encode(error_event(message)) + _DONE)
    return stream


def _encode(event: Any) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


async def while_connected(request: web.Request, parts: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    """Yield parts until the client disconnects. Requests end with their client; control calls continue without it."""
    async for part in parts:
        if request.transport is None or request.transport.is_closing():
            return
        yield part
