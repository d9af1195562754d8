"""Routes of the batch server: batches, which go to smg one prompt at a time, and requests that bypass smg and go to an engine.

Embeddings, rewards and scores bypass smg too. The front also sends long bodies here, because smg limits neither the time of a body nor
the memory of all bodies. They are forwarded to smg unchanged.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from sglang_rollout.api.limits_spec import Limits
from sglang_rollout.batches.callers import CallerCheck
from sglang_rollout.batches.client import HOLD_SECONDS, NO_ENGINE, ConnectionLostError, GenerateClient, UnreachableError
from sglang_rollout.batches.memory import Budget, ExhaustedError, Share, TooLargeError, objects_bytes
from sglang_rollout.batches.serving import ServingView
from sglang_rollout.batches.split import BatchError, Item, encode, join, parse, split
from sglang_rollout.batches.streams import BatchStream, ItemError, Send, run_bounded
from sglang_rollout.sglang.api import CHAT_COMPLETIONS, COMPLETIONS, DIRECT_PATHS, GENERATE
from sglang_rollout.sglang.smg_limits import IGNORED_FIELDS, should_bypass_smg
from sglang_rollout.wire.access import CALLER_HEADER, RELAYED_AUTHORIZATION_HEADER, RELAYED_CALLER_HEADER
from sglang_rollout.wire.ports import BROKEN_HEADER, VERSION_HEADER

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 64 * 2**20
"""Largest batch; as much as smg buffers of a request for a retry."""
ATTEMPTS = 2
"""Engines that get a prompt, if the first breaks off: no prompt ends more than two. The front has the same limit."""
BODY_SECONDS = 60.0
"""Longest time until a body has arrived, besides the time for its bytes."""
BODY_BYTES_PER_SECOND = 2**20
"""Least speed at which a body may arrive after that time."""
MAX_RUNNING_PROMPTS = 1024
"""Prompts of one batch that are sent at a time."""
_SESSION_HEADERS = ("x-smg-routing-key", "x-session-id")
"""Headers that name a conversation, as smg is configured to read them."""
_KEPT_HEADERS = ("Content-Type", "Retry-After", BROKEN_HEADER)
"""Headers of a refused item that the answer to its batch has, too."""
_JSON = "application/json"
_HOP_HEADERS = frozenset(
    {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "proxy-authorization", "proxy-authenticate"}
    | {"host", "content-length", "expect", "accept-encoding", "content-type"}
    | {"authorization", CALLER_HEADER.lower(), RELAYED_CALLER_HEADER.lower(), RELAYED_AUTHORIZATION_HEADER.lower()}
)
"""Headers that belong to one connection, one body or the caller. Engines run model code, so no token reaches them."""
_BLOCK_BYTES = 2**18
"""Size from which a part of an answer is written."""
_RETRY_SECONDS = 0.25
NO_WORKERS_SECONDS = 10.0
"""Longest wait for smg's first worker after its restart, which takes 0.1 s; its list is compared twice a second."""


@dataclass(frozen=True)
class Parts:
    """Objects that the routes need."""

    client: GenerateClient
    view: ServingView
    budget: Budget
    limits: Limits
    callers: CallerCheck | None = None
    """None: everyone may send data requests."""


PARTS = web.AppKey("parts", Parts)
SHARE = web.RequestKey("share", Share)
"""The memory that a request has taken."""


_STATUSES: dict[type[Exception], int] = {
    BatchError: 400,
    TooLargeError: 413,
    ConnectionLostError: 502,
    ExhaustedError: 503,
    UnreachableError: 503,
}


@web.middleware
async def handle_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn errors into answers in the shape of SGLang's data paths."""
    try:
        return await handler(request)
    except ItemError as error:
        return web.Response(status=error.status, body=error.body, headers=error.headers)
    except tuple(_STATUSES) as error:
        if isinstance(error, UnreachableError) and error.__cause__ is not None:
            log.warning("%s: %s", request.path, error.__cause__)
        return _refuse(_STATUSES[type(error)], str(error), getattr(error, "code", None))
    except web.HTTPMethodNotAllowed as error:
        return _refuse(error.status, f"{request.method} {request.path}: use {' or '.join(sorted(error.allowed_methods - {'HEAD'}))}.")
    except web.HTTPException as error:
        return _refuse(error.status, f"{request.path}: {error.reason}.")
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return _refuse(500, f"{request.path} failed in the batch server; its log has the reason.")


def _admit(handler: Handler) -> Handler:
    """Refuse callers that are not allowed, and all requests while no engine may generate. Count the memory of the others."""

    async def handle(request: web.Request) -> web.StreamResponse:
        parts = request.app[PARTS]
        if parts.callers is not None and (refusal := await parts.callers.find_refusal(request.path, request.headers)) is not None:
            return refusal
        if reason := (await parts.view.read()).held:
            return _refuse(503, reason)
        with parts.budget.share(request.headers.get(CALLER_HEADER)) as share:
            request[SHARE] = share
            return await handler(request)

    return handle


@_admit
async def generate(request: web.Request) -> web.StreamResponse:
    """``POST /generate``: split a batch, forward any other body."""
    data = await _read_body(request)
    body = _parse(request, data)
    if ignored := [key for key in IGNORED_FIELDS if key in body]:
        for key in ignored:
            del body[key]
        data = encode(body)
    batch = split(body, request.app[PARTS].limits)
    if batch is None:
        bypass = should_bypass_smg(request.path, body)
        del body
        return await _forward_single(request, data, bypass=bypass)
    _check_batch_bytes(len(data))
    common = min(batch.size, MAX_RUNNING_PROMPTS) * len(encode(batch.common))  # each prompt is sent with the common fields
    request[SHARE].set_body(objects_bytes(data) + common)
    sent = len(data) + common
    del data, body

    def send(place: int) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        item = batch.item(place)
        if place == batch.size - 1:  # prompts are sent in order, so the fields are no longer needed
            batch.drop_fields()
            request[SHARE].set_body(sent)
        return _send_item(request, item)

    if batch.stream:
        return await BatchStream(request, batch.size, batch.samples, send, MAX_RUNNING_PROMPTS).run()
    return await _answer_batch(request, batch.size, send)


@_admit
async def completions(request: web.Request) -> web.StreamResponse:
    """``POST /v1/completions``: smg refuses prompts of token IDs, so they go to an engine."""
    data, body = await _with_adapter(request, await _read_body(request))
    prompt = body.get("prompt")
    ids = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], str)
    bypass = ids or should_bypass_smg(request.path, body)
    del body, prompt
    return await _forward_single(request, data, bypass=bypass)


@_admit
async def chat(request: web.Request) -> web.StreamResponse:
    """``POST /v1/chat/completions`` with values that smg refuses, or for a model with an adapter."""
    data, body = await _with_adapter(request, await _read_body(request))
    bypass = should_bypass_smg(request.path, body)
    del body
    return await _forward_single(request, data, bypass=bypass)


@_admit
async def direct(request: web.Request) -> web.StreamResponse:
    """Embeddings, rewards, scores and the tokenizer: a serving engine answers."""
    return await _forward_single(request, await _read_body(request), bypass=True)


async def _with_adapter(request: web.Request, data: bytes) -> tuple[bytes, dict[str, Any]]:
    """Return the body and its JSON, with SGLang's ``model: "name:adapter"`` written as ``model`` and ``lora_path``.

    smg knows models by their names alone, and answers 404 if the adapter is not one of the fleet's.
    """
    body = _parse(request, data)
    model = body.get("model")
    name, _, adapter = model.rpartition(":") if isinstance(model, str) else ("", "", "")
    if not name or adapter not in await _adapters(request, adapter):
        return data, body
    body = {**body, "model": name, "lora_path": adapter}
    return encode(body), body


async def _adapters(request: web.Request, wanted: str) -> tuple[str, ...]:
    """Return the names of the fleet's adapters. An unknown name may be newer than the last view, so the view is read again."""
    view = request.app[PARTS].view
    known = (await view.read()).adapters
    return known if wanted in known else (await view.read(max_age=0)).adapters


async def _forward_single(request: web.Request, data: bytes, *, bypass: bool) -> web.StreamResponse:
    """Forward a body to smg, or to an engine if smg would refuse or change it."""
    request[SHARE].set_body(len(data))
    if not bypass:
        return await _forward_to_smg(request, data)
    async with _ask_engine(request, data) as reply:
        return await _copy_answer(request, reply)


async def _answer_batch(request: web.Request, size: int, send: Send) -> web.StreamResponse:
    """Return all answers in one list. The first failed item cancels the other items."""
    answers = [b""] * size
    versions: list[str | None] = [None] * size

    async def answer(place: int) -> None:
        async with send(place) as reply:
            answers[place] = await _read_answer(request, reply)
            versions[place] = reply.headers.get(VERSION_HEADER)

    async with run_bounded(size, answer, MAX_RUNNING_PROMPTS) as tasks:
        await asyncio.gather(*tasks)
    request[SHARE].set_body(0)
    found = [version for version in dict.fromkeys(versions) if version]
    return await _write_list(request, answers, {VERSION_HEADER: ", ".join(found)} if found else {})


async def _write_list(request: web.Request, answers: Sequence[bytes], headers: Mapping[str, str]) -> web.StreamResponse:
    """Write the answers as one list in blocks, so that no second copy of all answers takes memory.

    Written here and not by the server, so that the memory counts until the client has read the answer.
    """
    length = sum(len(part) for part in join(answers))
    response = web.StreamResponse(headers={**headers, "Content-Type": _JSON, "Content-Length": str(length)})
    await response.prepare(request)
    block = bytearray()
    for part in join(answers):
        block += part
        if len(block) >= _BLOCK_BYTES:
            await response.write(block)
            block = bytearray()  # the connection may still hold the written one
    await response.write(block)
    await response.write_eof()
    return response


@asynccontextmanager
async def _send_item(request: web.Request, item: Item) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield the answer 200 to one item of a batch. Raise ItemError for any other answer.

    A 404 comes from an smg that has just started and has no workers yet. It is retried, so that the batch is not lost.
    """
    data = encode(item)
    send = _ask_engine if should_bypass_smg(GENERATE, item) else _ask_smg
    del item
    loop = asyncio.get_running_loop()
    end = None
    async with request.app[PARTS].client.batch_prompts:
        while True:
            async with send(request, data) as reply:
                if reply.status == 200:
                    yield reply
                    return
                if reply.status != 404:
                    headers = {name: reply.headers[name] for name in _KEPT_HEADERS if name in reply.headers}
                    raise ItemError(reply.status, await _read_answer(request, reply), headers)
            end = end or loop.time() + NO_WORKERS_SECONDS
            if loop.time() >= end:
                raise UnreachableError(NO_ENGINE)
            await asyncio.sleep(_RETRY_SECONDS)


@asynccontextmanager
async def _ask_smg(request: web.Request, data: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
    client = request.app[PARTS].client
    for attempt in range(1, ATTEMPTS + 1):
        async with await client.post(client.url + request.path_qs, data, _forwarded_headers(request), hold=HOLD_SECONDS) as reply:
            if BROKEN_HEADER not in reply.headers or attempt == ATTEMPTS:
                yield reply
                return


async def _forward_to_smg(request: web.Request, data: bytes) -> web.StreamResponse:
    async with _ask_smg(request, data) as reply:
        if reply.status == 404 and request.path == GENERATE:
            return _refuse(503, NO_ENGINE)
        return await _copy_answer(request, reply)


@asynccontextmanager
async def _ask_engine(request: web.Request, data: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield the answer of a serving engine. If the engine's gate has just closed, or the engine broke off, ask the next engine."""
    client = request.app[PARTS].client
    loop = asyncio.get_running_loop()
    end = loop.time() + HOLD_SECONDS
    attempt = 1
    while loop.time() < end:
        for url in await _serving_urls(request):
            try:
                reply = await client.post(url + request.path_qs, data, _forwarded_headers(request))
            except UnreachableError:
                continue
            async with reply:
                if reply.status == 503:
                    continue
                if BROKEN_HEADER not in reply.headers or attempt == ATTEMPTS:
                    yield reply
                    return
                attempt += 1
        await asyncio.sleep(_RETRY_SECONDS)
    raise UnreachableError(NO_ENGINE)


async def _serving_urls(request: web.Request) -> list[str]:
    """Return the gates of serving engines in the order to ask: by session if the request names one, else round robin."""
    parts = request.app[PARTS]
    urls = list((await parts.view.read()).engines)
    session = next((request.headers[name] for name in _SESSION_HEADERS if name in request.headers), None)
    if session is not None:
        return sorted(urls, key=lambda url: hashlib.sha256(f"{session} {url}".encode()).digest())
    start = next(parts.client.turns) % len(urls) if urls else 0
    return urls[start:] + urls[:start]


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


async def _read_answer(request: web.Request, reply: aiohttp.ClientResponse) -> bytes:
    """Return an answer. Its parts count as memory as they arrive, because one answer may hold many samples."""
    parts = []
    try:
        async for part in reply.content.iter_any():
            request[SHARE].add_answer(len(part))
            parts.append(part)
    except (aiohttp.ClientError, OSError) as error:
        raise ConnectionLostError(f"The engine broke the connection in the middle of an answer ({type(error).__name__}).") from None
    return b"".join(parts)


async def _read_body(request: web.Request) -> bytes:
    """Return the body. Its parts count as memory as they arrive.

    The whole body has a deadline, because a client that sends a byte now and then would keep its place and its memory for hours.
    """
    limit = request.app[PARTS].limits.request_bytes
    parts: list[bytes] = []
    size, announced = 0, request.content_length or 0
    began = asyncio.get_running_loop().time()
    while announced <= limit:
        seconds = BODY_SECONDS + max(announced, size) / BODY_BYTES_PER_SECOND
        try:
            async with asyncio.timeout_at(began + seconds):
                chunk = await request.content.readany()
        except TimeoutError:
            raise _refused_body(408, f"The body did not arrive within {seconds:.0f} s.") from None
        if not chunk:
            return b"".join(parts)
        size += len(chunk)
        if size > limit:
            break
        try:
            request[SHARE].set_body(size)
        except ExhaustedError as error:
            raise _refused_body(503, str(error), {"Retry-After": "1"}) from None
        parts.append(chunk)
    message = f"The body has more than {limit} bytes; engine.limits.requestBytes raises it."
    raise _refused_body(400, message, code="above_limit")


def _check_batch_bytes(size: int) -> None:
    """Refuse a body that is larger than a batch may be."""
    if size > MAX_BODY_BYTES:
        raise _refused_body(413, f"A batch may have at most {MAX_BODY_BYTES >> 20} MiB: split it.")


def _refused_body(status: int, message: str, headers: Mapping[str, str] | None = None, code: str | None = None) -> ItemError:
    """Return the refusal of a body that is not read to its end, with a code if it has one."""
    error = {"code": code, "type": "invalid_request_error", "message": message} if code else {"message": message}
    body = json.dumps({"error": error}).encode()
    return ItemError(status, body, {"Content-Type": _JSON, "Connection": "close", **(headers or {})})


def _parse(request: web.Request, data: bytes) -> dict[str, Any]:
    """Return the fields of a body.

    Raises:
        BatchError: The body is not a JSON object in UTF-8.
        TooLargeError: The objects of this body would take too much memory.
        ExhaustedError: The objects of all bodies would take too much memory.
    """
    request[SHARE].set_body(len(data) + objects_bytes(data))
    return parse(data)


def _forwarded_headers(request: web.Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name.lower() not in _HOP_HEADERS} | {
        "Content-Type": _JSON,
        "Accept-Encoding": "identity",
    }


def _refuse(status: int, message: str, code: str | None = None) -> web.Response:
    """Return a refusal in the shape of SGLang's data paths, with a code if it has one."""
    headers = {"Retry-After": "1"} if status == 503 else {}
    error = {"code": code, "type": "invalid_request_error", "message": message} if code else {"message": message}
    return web.json_response({"error": error}, status=status, headers=headers)


routes = [
    *(web.post(GENERATE, generate), web.post(COMPLETIONS, completions), web.post(CHAT_COMPLETIONS, chat)),
    *(web.post(path, direct) for path in DIRECT_PATHS),
]
