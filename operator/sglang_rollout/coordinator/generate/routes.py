"""Requests for tokens that smg would refuse or change: batches, sent to it one by one, and what it cannot carry at all, sent to an engine.
So are requests for embeddings, rewards and scores.

The front sends only such requests here, and those whose prompt it cannot see because it stands behind a long field; whatever else
comes is passed on to smg as it is.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from sglang_rollout.coordinator.generate.batches import Batch, BatchError, encoded, join, split
from sglang_rollout.coordinator.generate.client import HOLD_SECONDS, BrokeOffError, NobodyAnswersError
from sglang_rollout.coordinator.generate.streams import BatchStream
from sglang_rollout.coordinator.generate.token_ids import why_mixed
from sglang_rollout.coordinator.http.parts import PARTS, Handler
from sglang_rollout.coordinator.update import adapters as lora
from sglang_rollout.sglang.api import CHAT_COMPLETIONS, COMPLETIONS, DIRECT_PATHS, GENERATE
from sglang_rollout.sglang.smg_limits import should_bypass_smg
from sglang_rollout.wire.ports import VERSION_HEADER

LARGEST_BODY = 64 * 2**20
"""Of a batch; as much as smg keeps of a request in order to send it again."""
_SESSION = ("x-smg-routing-key", "x-session-id")
"""Headers that name a conversation, as smg is told to read them."""
_JSON = "application/json"
_HOP = frozenset(
    {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "proxy-authorization", "proxy-authenticate"}
    | {"host", "content-length", "expect", "accept-encoding", "content-type"}
)
"""Headers that belong to one connection or one body, not to the request."""
_PAUSE = 0.25
UNLISTED_SECONDS = 10.0
"""smg restarts in 0.1 s, and its list of engines is kept twice a second."""
NOBODY = (
    "No engine can take this request now: none holds the weights that the fleet has committed, or the router is restarting. "
    "GET /fleet tells the state of each engine. Try again."
)


class ItemError(Exception):
    """One request of a batch was not answered with tokens; the whole batch is answered like it."""

    def __init__(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.body = body
        self.headers = headers


def _told(handler: Handler) -> Handler:
    """Turn what can go wrong into answers in the shape of SGLang's data paths."""

    async def handle(request: web.Request) -> web.StreamResponse:
        machine = request.app[PARTS].driver.machine
        if held := machine.fleet.why_not_generating if machine is not None else "":
            return _refused(503, held)
        try:
            return await handler(request)
        except BatchError as error:
            return _refused(400, str(error))
        except ItemError as error:
            return web.Response(status=error.status, body=error.body, headers=error.headers)
        except NobodyAnswersError:
            return _refused(503, NOBODY)
        except BrokeOffError as error:
            return _refused(502, str(error))

    return handle


@_told
async def generate(request: web.Request) -> web.StreamResponse:
    """``POST /generate``: a batch in parts, anything else as it came."""
    data = await _read(request)
    body = _document(data)
    batch = split(body) if isinstance(body, dict) else None
    if batch is None:
        return await _single(request, data, body)
    if batch.stream:
        return await BatchStream(request, batch, lambda item: _item(request, item)).run()
    return await _whole(request, batch)


@_told
async def completions(request: web.Request) -> web.StreamResponse:
    """``POST /v1/completions``: smg reads prompts of token ids as an error, so an engine is asked directly."""
    data, body = _with_adapter(request, await _read(request))
    prompt = body.get("prompt") if isinstance(body, dict) else None
    ids = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], str)
    return await _single(request, data, body, direct=ids)


@_told
async def chat(request: web.Request) -> web.StreamResponse:
    """``POST /v1/chat/completions`` with numbers that smg refuses and engines take, or for a model with an adapter."""
    data, body = _with_adapter(request, await _read(request))
    return await _single(request, data, body)


@_told
async def direct(request: web.Request) -> web.StreamResponse:
    """Embeddings, rewards, scores and the tokenizer: an engine that serves answers.

    The body is written again, so that the gate's filter sees every key and number in its plain form.
    """
    body = _document(await _read(request))
    if not isinstance(body, dict):
        return _refused(400, f"{request.path} needs a JSON object as its body.")
    if why := why_mixed(body):
        return _refused(400, why)
    try:
        data = encoded(body)
    except RecursionError:
        return _refused(400, f"{request.path}: the body nests too deep.")
    async with _by_engine(request, data) as reply:
        return await _copied(request, reply)


def _with_adapter(request: web.Request, data: bytes) -> tuple[bytes, Any]:
    """The body and its JSON. SGLang's ``model: "name:adapter"`` is said with ``lora_path``: smg knows models by their names alone, and
    answers with 404 when the adapter is not one of the fleet's."""
    body = _document(data)
    model = body.get("model") if isinstance(body, dict) else None
    name, _, adapter = model.rpartition(":") if isinstance(model, str) else ("", "", "")
    if not name or adapter not in lora.wanted(request.app[PARTS].machine.fleet):
        return data, body
    body = {**body, "model": name, "lora_path": adapter}
    return encoded(body), body


async def _single(request: web.Request, data: bytes, body: Any, *, direct: bool = False) -> web.StreamResponse:
    if not direct and not should_bypass_smg(request.path, body):
        return await _passed_on(request, data)
    async with _by_engine(request, data) as reply:
        return await _copied(request, reply)


async def _whole(request: web.Request, batch: Batch) -> web.Response:
    """All answers in one list. The first that fails ends the others: their requests are cancelled."""
    async with _tasks([_answer(request, item) for item in batch.items]) as tasks:
        answers = await asyncio.gather(*tasks)
    versions = list(dict.fromkeys(version for _, version in answers if version))
    headers = {VERSION_HEADER: ", ".join(versions)} if versions else {}
    return web.Response(body=join([body for body, _ in answers]), content_type=_JSON, headers=headers)


async def _answer(request: web.Request, item: dict[str, Any]) -> tuple[bytes, str | None]:
    async with _item(request, item) as reply:
        return await _rest(reply), reply.headers.get(VERSION_HEADER)


@asynccontextmanager
async def _item(request: web.Request, item: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
    """One request of a batch, answered with 200. Raises ItemError for any other answer.

    A 404 is an smg that has just (re)started and has no engines yet; the others of the batch should not be lost for that.
    """
    data = encoded(item)
    ask = _by_engine if should_bypass_smg(GENERATE, item) else _by_smg
    loop = asyncio.get_running_loop()
    end = loop.time() + UNLISTED_SECONDS
    while True:
        async with ask(request, data) as reply:
            if reply.status == 200:
                yield reply
                return
            if reply.status != 404:
                headers = {name: reply.headers[name] for name in ("Content-Type", "Retry-After") if name in reply.headers}
                raise ItemError(reply.status, await _rest(reply), headers)
        if loop.time() >= end:
            raise NobodyAnswersError(NOBODY)
        await asyncio.sleep(_PAUSE)


@asynccontextmanager
async def _by_smg(request: web.Request, data: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
    async with request.app[PARTS].smg.post(request.path_qs, data, _forwarded(request)) as reply:
        yield reply


async def _passed_on(request: web.Request, data: bytes) -> web.StreamResponse:
    async with _by_smg(request, data) as reply:
        if reply.status == 404 and request.path == GENERATE:
            return _refused(503, NOBODY)
        return await _copied(request, reply)


@asynccontextmanager
async def _by_engine(request: web.Request, data: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
    """A gate that has just closed sends the request to the next engine."""
    smg = request.app[PARTS].smg
    loop = asyncio.get_running_loop()
    end = loop.time() + HOLD_SECONDS
    while loop.time() < end:
        for url in _serving(request):
            async with AsyncExitStack() as stack:
                try:
                    reply = await stack.enter_async_context(smg.post_to(url + request.path_qs, data, _forwarded(request)))
                except NobodyAnswersError:
                    continue
                if reply.status != 503:
                    yield reply
                    return
        await asyncio.sleep(_PAUSE)
    raise NobodyAnswersError(NOBODY)


def _serving(request: web.Request) -> list[str]:
    """Base URLs of the gates of engines that serve: a session always begins with the same one, others take turns."""
    parts = request.app[PARTS]
    urls = [parts.members.url(name) for name, engine in parts.machine.fleet.engines.items() if engine.serving]
    found = [url for url in urls if url is not None]
    session = next((request.headers[name] for name in _SESSION if name in request.headers), None)
    if session is not None:
        return sorted(found, key=lambda url: hashlib.sha256(f"{session} {url}".encode()).digest())
    start = next(parts.smg.turns) % len(found) if found else 0
    return found[start:] + found[:start]


async def _copied(request: web.Request, reply: aiohttp.ClientResponse) -> web.StreamResponse:
    """The answer as it comes, chunk by chunk."""
    headers = {name: value for name, value in reply.headers.items() if name.lower() not in _HOP - {"content-type"}}
    answer = web.StreamResponse(status=reply.status, reason=reply.reason, headers=headers)
    await answer.prepare(request)
    try:
        async for chunk in reply.content.iter_any():
            await answer.write(chunk)
    except (aiohttp.ClientError, OSError):
        # The status is out. A connection that breaks is the only honest end.
        if request.transport is not None:
            request.transport.abort()
        return answer
    await answer.write_eof()
    return answer


async def _rest(reply: aiohttp.ClientResponse) -> bytes:
    try:
        return await reply.read()
    except (aiohttp.ClientError, OSError) as error:
        raise BrokeOffError(f"The engine broke the connection in the middle of an answer ({type(error).__name__}).") from None


async def _read(request: web.Request) -> bytes:
    """The body. Not ``request.read()``, whose limit is meant for control calls."""
    parts, size = [], request.content_length or 0
    if size <= LARGEST_BODY:
        size = 0
        async for chunk in request.content.iter_any():
            size += len(chunk)
            if size > LARGEST_BODY:
                break
            parts.append(chunk)
        else:
            return b"".join(parts)
    message = f"A batch of more than {LARGEST_BODY >> 20} MiB is not taken: send it in several."
    raise ItemError(413, json.dumps({"error": {"message": message}}).encode(), {"Content-Type": _JSON, "Connection": "close"})


def _document(data: bytes) -> Any:
    """The body's JSON; None for what is none, about which smg has its own words."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _forwarded(request: web.Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name.lower() not in _HOP} | {
        "Content-Type": _JSON,
        "Accept-Encoding": "identity",
    }


def _refused(status: int, message: str) -> web.Response:
    """A refusal in the shape of SGLang's data paths."""
    headers = {"Retry-After": "1"} if status == 503 else {}
    return web.json_response({"error": {"message": message}}, status=status, headers=headers)


@asynccontextmanager
async def _tasks(coroutines: Sequence[Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Tasks that do not outlive the block: a client that goes away takes its whole batch along."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


routes = [
    *(web.post(GENERATE, generate), web.post(COMPLETIONS, completions), web.post(CHAT_COMPLETIONS, chat)),
    *(web.post(path, direct) for path in DIRECT_PATHS),
]
