"""Routes of the data path: batches, which go to smg one item at a time, and requests that bypass smg and go to an engine.

Embeddings, rewards and scores bypass smg too. Besides these, the front sends only requests here whose prompt is hidden behind a long
field. Every other request is forwarded to smg unchanged.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from sglang_rollout.coordinator.generate.batches import Batch, BatchError, encode, find_mixed_token_ids, join, split
from sglang_rollout.coordinator.generate.smg import HOLD_SECONDS, ConnectionLostError, UnreachableError
from sglang_rollout.coordinator.generate.streams import BatchStream
from sglang_rollout.coordinator.http import app as http
from sglang_rollout.coordinator.http.app import PARTS, Handler
from sglang_rollout.coordinator.update import adapters as lora
from sglang_rollout.sglang.api import CHAT_COMPLETIONS, COMPLETIONS, DIRECT_PATHS, GENERATE
from sglang_rollout.sglang.smg_limits import should_bypass_smg
from sglang_rollout.wire.ports import VERSION_HEADER

MAX_BODY_BYTES = 64 * 2**20
"""Largest batch; as much as smg buffers of a request for a retry."""
_SESSION_HEADERS = ("x-smg-routing-key", "x-session-id")
"""Headers that name a conversation, as smg is configured to read them."""
_JSON = "application/json"
_HOP_HEADERS = frozenset(
    {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "proxy-authorization", "proxy-authenticate"}
    | {"host", "content-length", "expect", "accept-encoding", "content-type"}
)
"""Headers that belong to one connection or one body, not to the request."""
_RETRY_SECONDS = 0.25
NO_WORKERS_SECONDS = 10.0
"""Longest wait for smg's first worker after its restart, which takes 0.1 s; its list is compared twice a second."""
NO_ENGINE = (
    "No engine serves this request now: none holds the weights that the fleet has committed, or the router is restarting. "
    "GET /fleet shows the state of each engine. Try again."
)


class ItemError(Exception):
    """An item of a batch failed; the whole batch gets the same answer."""

    def __init__(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.body = body
        self.headers = headers


def _with_errors(handler: Handler) -> Handler:
    """Turn the errors of this module into answers in the shape of SGLang's data paths."""

    async def handle(request: web.Request) -> web.StreamResponse:
        machine = request.app[PARTS].driver.machine
        if reason := machine.fleet.why_not_generating if machine is not None else "":
            return _refuse(503, reason)
        try:
            return await handler(request)
        except BatchError as error:
            return _refuse(400, str(error))
        except ItemError as error:
            return web.Response(status=error.status, body=error.body, headers=error.headers)
        except UnreachableError:
            return _refuse(503, NO_ENGINE)
        except ConnectionLostError as error:
            return _refuse(502, str(error))

    return handle


@_with_errors
async def generate(request: web.Request) -> web.StreamResponse:
    """``POST /generate``: split a batch, forward any other body."""
    data = await _read_body(request)
    body = _parse(data)
    batch = split(body) if isinstance(body, dict) else None
    if batch is None:
        return await _forward_single(request, data, body)
    if batch.stream:
        return await BatchStream(request, batch, lambda item: _send_item(request, item)).run()
    return await _answer_batch(request, batch)


@_with_errors
async def completions(request: web.Request) -> web.StreamResponse:
    """``POST /v1/completions``: smg refuses prompts of token IDs, so they go to an engine."""
    data, body = _with_adapter(request, await _read_body(request))
    prompt = body.get("prompt") if isinstance(body, dict) else None
    ids = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], str)
    return await _forward_single(request, data, body, direct=ids)


@_with_errors
async def chat(request: web.Request) -> web.StreamResponse:
    """``POST /v1/chat/completions`` with values that smg refuses, or for a model with an adapter."""
    data, body = _with_adapter(request, await _read_body(request))
    return await _forward_single(request, data, body)


@_with_errors
async def direct(request: web.Request) -> web.StreamResponse:
    """Embeddings, rewards, scores and the tokenizer: a serving engine answers.

    The body is encoded again, so that the gate's filter sees every key and number in its plain form.
    """
    body = _parse(await _read_body(request))
    if not isinstance(body, dict):
        return _refuse(400, f"{request.path} needs a JSON object as its body.")
    if problem := find_mixed_token_ids(body):
        return _refuse(400, problem)
    try:
        data = encode(body)
    except RecursionError:
        return _refuse(400, f"{request.path}: the body nests too deep.")
    async with _ask_engine(request, data) as reply:
        return await _copy_answer(request, reply)


def _with_adapter(request: web.Request, data: bytes) -> tuple[bytes, Any]:
    """Return the body and its JSON, with SGLang's ``model: "name:adapter"`` written as ``model`` and ``lora_path``.

    smg knows models by their names alone, and answers 404 if the adapter is not one of the fleet's.
    """
    body = _parse(data)
    model = body.get("model") if isinstance(body, dict) else None
    name, _, adapter = model.rpartition(":") if isinstance(model, str) else ("", "", "")
    if not name or adapter not in lora.wanted_adapters(request.app[PARTS].machine.fleet):
        return data, body
    body = {**body, "model": name, "lora_path": adapter}
    return encode(body), body


async def _forward_single(request: web.Request, data: bytes, body: Any, *, direct: bool = False) -> web.StreamResponse:
    if not direct and not should_bypass_smg(request.path, body):
        return await _forward_to_smg(request, data)
    async with _ask_engine(request, data) as reply:
        return await _copy_answer(request, reply)


async def _answer_batch(request: web.Request, batch: Batch) -> web.Response:
    """Return all answers in one list. The first failed item cancels the other items."""
    async with _tasks([_answer_item(request, item) for item in batch.items]) as tasks:
        answers = await asyncio.gather(*tasks)
    versions = list(dict.fromkeys(version for _, version in answers if version))
    headers = {VERSION_HEADER: ", ".join(versions)} if versions else {}
    return web.Response(body=join([body for body, _ in answers]), content_type=_JSON, headers=headers)


async def _answer_item(request: web.Request, item: dict[str, Any]) -> tuple[bytes, str | None]:
    async with _send_item(request, item) as reply:
        return await _read_answer(reply), reply.headers.get(VERSION_HEADER)


@asynccontextmanager
async def _send_item(request: web.Request, item: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield the answer 200 to one item of a batch. Raise ItemError for any other answer.

    A 404 comes from an smg that has just started and has no workers yet. It is retried, so that the batch is not lost.
    """
    data = encode(item)
    send = _ask_engine if should_bypass_smg(GENERATE, item) else _ask_smg
    loop = asyncio.get_running_loop()
    end = loop.time() + NO_WORKERS_SECONDS
    while True:
        async with send(request, data) as reply:
            if reply.status == 200:
                yield reply
                return
            if reply.status != 404:
                headers = {name: reply.headers[name] for name in ("Content-Type", "Retry-After") if name in reply.headers}
                raise ItemError(reply.status, await _read_answer(reply), headers)
        if loop.time() >= end:
            raise UnreachableError(NO_ENGINE)
        await asyncio.sleep(_RETRY_SECONDS)


@asynccontextmanager
async def _ask_smg(request: web.Request, data: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
    client = request.app[PARTS].generate
    async with await client.post(client.url + request.path_qs, data, _forwarded_headers(request), hold=HOLD_SECONDS) as reply:
        yield reply


async def _forward_to_smg(request: web.Request, data: bytes) -> web.StreamResponse:
    async with _ask_smg(request, data) as reply:
        if reply.status == 404 and request.path == GENERATE:
            return _refuse(503, NO_ENGINE)
        return await _copy_answer(request, reply)


@asynccontextmanager
async def _ask_engine(request: web.Request, data: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield the answer of a serving engine. If the engine's gate has just closed, ask the next engine."""
    client = request.app[PARTS].generate
    loop = asyncio.get_running_loop()
    end = loop.time() + HOLD_SECONDS
    while loop.time() < end:
        for url in _serving_urls(request):
            try:
                reply = await client.post(url + request.path_qs, data, _forwarded_headers(request))
            except UnreachableError:
                continue
            async with reply:
                if reply.status != 503:
                    yield reply
                    return
        await asyncio.sleep(_RETRY_SECONDS)
    raise UnreachableError(NO_ENGINE)


def _serving_urls(request: web.Request) -> list[str]:
    """Return the gates of serving engines in the order to ask: by session if the request names one, else round robin."""
    parts = request.app[PARTS]
    urls = [parts.wanted_engines.url(name) for name, engine in parts.machine.fleet.engines.items() if engine.serving]
    found = [url for url in urls if url is not None]
    session = next((request.headers[name] for name in _SESSION_HEADERS if name in request.headers), None)
    if session is not None:
        return sorted(found, key=lambda url: hashlib.sha256(f"{session} {url}".encode()).digest())
    start = next(parts.generate.turns) % len(found) if found else 0
    return found[start:] + found[:start]


async def _copy_answer(request: web.Request, reply: aiohttp.ClientResponse) -> web.StreamResponse:
    """Forward an answer chunk by chunk."""
    headers = {name: value for name, value in reply.headers.items() if name.lower() not in _HOP_HEADERS - {"content-type"}}
    answer = web.StreamResponse(status=reply.status, reason=reply.reason, headers=headers)
    await answer.prepare(request)
    try:
        async for chunk in reply.content.iter_any():
            await answer.write(chunk)
    except (aiohttp.ClientError, OSError):
        # The status is sent already, so only a broken connection can report the failure.
        if request.transport is not None:
            request.transport.abort()
        return answer
    await answer.write_eof()
    return answer


async def _read_answer(reply: aiohttp.ClientResponse) -> bytes:
    try:
        return await reply.read()
    except (aiohttp.ClientError, OSError) as error:
        raise ConnectionLostError(f"The engine broke the connection in the middle of an answer ({type(error).__name__}).") from None


async def _read_body(request: web.Request) -> bytes:
    """Return the body. ``request.read()`` has the limit of control calls."""
    parts, size = [], request.content_length or 0
    if size <= MAX_BODY_BYTES:
        size = 0
        while chunk := await _read_chunk(request):
            size += len(chunk)
            if size > MAX_BODY_BYTES:
                break
            parts.append(chunk)
        else:
            return b"".join(parts)
    raise _refused_body(413, f"A batch may have at most {MAX_BODY_BYTES >> 20} MiB: split it.")


async def _read_chunk(request: web.Request) -> bytes:
    """Return the next part of the body; empty at its end."""
    try:
        async with asyncio.timeout(http.BODY_SECONDS):
            return await request.content.readany()
    except TimeoutError:
        raise _refused_body(408, f"No further part of the body arrived within {http.BODY_SECONDS:g} s.") from None


def _refused_body(status: int, message: str) -> ItemError:
    """Return the refusal of a body that is not read to its end."""
    return ItemError(status, json.dumps({"error": {"message": message}}).encode(), {"Content-Type": _JSON, "Connection": "close"})


def _parse(data: bytes) -> Any:
    """Return the JSON of a body; None if the JSON is invalid. smg itself refuses such a body."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _forwarded_headers(request: web.Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name.lower() not in _HOP_HEADERS} | {
        "Content-Type": _JSON,
        "Accept-Encoding": "identity",
    }


def _refuse(status: int, message: str) -> web.Response:
    """Return a refusal in the shape of SGLang's data paths."""
    headers = {"Retry-After": "1"} if status == 503 else {}
    return web.json_response({"error": {"message": message}}, status=status, headers=headers)


@asynccontextmanager
async def _tasks(coroutines: Sequence[Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Yield tasks that are cancelled at the end of the block, so that a batch ends when its client has gone."""
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
