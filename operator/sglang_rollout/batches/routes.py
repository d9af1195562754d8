"""Routes of the batch server: batches, which go to smg one prompt at a time, and requests that bypass smg and go to an engine.

Embeddings, rewards and scores bypass smg too. The front also sends long bodies here, because smg limits neither the time of a body nor
the memory of all bodies. They are forwarded to smg unchanged.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
from aiohttp import web
from pydantic import ValidationError

from sglang_rollout.batches.aborted import AbortedError, Form, encode_answer, encode_samples, read_form
from sglang_rollout.batches.client import NO_ENGINE, ConnectionLostError, UnreachableError
from sglang_rollout.batches.memory import ExhaustedError, TooLargeError, objects_bytes
from sglang_rollout.batches.parts import HELD, PARTS, SHARE
from sglang_rollout.batches.sending import HOP_HEADERS, ask_engine, ask_smg, read_answer, send_item
from sglang_rollout.batches.split import Batch, BatchError, encode, join, parse, split
from sglang_rollout.batches.streams import BatchStream, ItemError, Send, run_bounded
from sglang_rollout.sglang.api import CHAT_COMPLETIONS, COMPLETIONS, DIRECT_PATHS, GENERATE, GENERATING_PATHS
from sglang_rollout.sglang.smg_limits import IGNORED_FIELDS, should_bypass_smg
from sglang_rollout.wire.access import CALLER_HEADER
from sglang_rollout.wire.held import HeldAbort, HeldAbortReply
from sglang_rollout.wire.ports import BATCHES_ABORT, VERSION_HEADER

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 64 * 2**20
"""Largest batch; as much as smg buffers of a request for a retry."""
BODY_SECONDS = 60.0
"""Longest time until a body has arrived, besides the time for its bytes."""
BODY_BYTES_PER_SECOND = 2**20
"""Least speed at which a body may arrive after that time."""
MAX_RUNNING_PROMPTS = 1024
"""Prompts of one batch that are sent at a time."""
_JSON = "application/json"
_BLOCK_BYTES = 2**18
"""Size from which a part of an answer is written."""
_STATUSES: dict[type[Exception], int] = {
    BatchError: 400,
    AbortedError: 400,
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
        with parts.budget.share(request.headers.get(CALLER_HEADER)) as share, parts.held.open() as held:
            request[SHARE], request[HELD] = share, held
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
        form, bypass = read_form(request.path, body), should_bypass_smg(request.path, body)
        del body
        return await _forward_single(request, data, form, bypass=bypass)
    _check_batch_bytes(len(data))
    request[HELD].rids = _name_prompts(batch, body.get("rid"))
    common = min(batch.size, MAX_RUNNING_PROMPTS) * len(encode(batch.common))  # each prompt is sent with the common fields
    request[SHARE].set_body(objects_bytes(data) + common)
    sent = len(data) + common
    del data, body

    def send(place: int) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        item = batch.item(place)
        if place == batch.size - 1:  # prompts are sent in order, so the fields are no longer needed
            batch.drop_fields()
            request[SHARE].set_body(sent)
        return send_item(request, item, batch.samples)

    if batch.stream:
        return await BatchStream(request, batch.size, batch.samples, send, MAX_RUNNING_PROMPTS).run()
    return await _answer_batch(request, batch.size, send)


def _name_prompts(batch: Batch, given: Any) -> frozenset[str]:
    """Return the request IDs of a batch: of its prompts, and the one that the client gave for all of them."""
    return frozenset(map(str, (*batch.columns.get("rid", ()), *([given] if isinstance(given, str) else ()))))


@_admit
async def completions(request: web.Request) -> web.StreamResponse:
    """``POST /v1/completions``: smg refuses prompts of token IDs, so they go to an engine."""
    data, body = await _with_adapter(request, await _read_body(request))
    prompt = body.get("prompt")
    ids = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], str)
    form, bypass = read_form(request.path, body), ids or should_bypass_smg(request.path, body)
    del body, prompt
    return await _forward_single(request, data, form, bypass=bypass)


@_admit
async def chat(request: web.Request) -> web.StreamResponse:
    """``POST /v1/chat/completions`` with values that smg refuses, or for a model with an adapter."""
    data, body = await _with_adapter(request, await _read_body(request))
    form, bypass = read_form(request.path, body), should_bypass_smg(request.path, body)
    del body
    return await _forward_single(request, data, form, bypass=bypass)


@_admit
async def direct(request: web.Request) -> web.StreamResponse:
    """Embeddings, rewards, scores and the tokenizer: a serving engine answers."""
    return await _forward_single(request, await _read_body(request), Form(request.path), bypass=True)


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


async def _forward_single(request: web.Request, data: bytes, form: Form, *, bypass: bool) -> web.StreamResponse:
    """Forward a body to smg, or to an engine if smg would refuse or change it."""
    request[SHARE].set_body(len(data))
    request[HELD].rids = frozenset(filter(None, [form.rid]))
    try:
        ask = ask_engine if bypass else ask_smg
        async with request[HELD].hold(form) as prompt, ask(request, data, prompt) as reply:
            if reply.status == 404 and request.path == GENERATE and not bypass:
                return _refuse(503, NO_ENGINE)
            prompt.note_answer()
            return await _copy_answer(request, reply)
    except AbortedError as error:
        if form.path not in GENERATING_PATHS:
            raise
        kind, body = encode_answer(error)
        return web.Response(body=body, headers={"Content-Type": kind})


async def _answer_batch(request: web.Request, size: int, send: Send) -> web.StreamResponse:
    """Return all answers in one list. The first failed item cancels the other items."""
    answers = [b""] * size
    versions: list[str | None] = [None] * size

    async def answer(place: int) -> None:
        try:
            async with send(place) as reply:
                answers[place] = await read_answer(request, reply)
                versions[place] = reply.headers.get(VERSION_HEADER)
        except AbortedError as error:
            answers[place], versions[place] = encode_samples(error), error.weight_version
            request[SHARE].add_answer(len(answers[place]))

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


async def _copy_answer(request: web.Request, reply: aiohttp.ClientResponse) -> web.StreamResponse:
    """Forward an answer chunk by chunk."""
    headers = {name: value for name, value in reply.headers.items() if name.lower() not in HOP_HEADERS - {"content-type"}}
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


def _refuse(status: int, message: str, code: str | None = None) -> web.Response:
    """Return a refusal in the shape of SGLang's data paths, with a code if it has one."""
    headers = {"Retry-After": "1"} if status == 503 else {}
    error = {"code": code, "type": "invalid_request_error", "message": message} if code else {"message": message}
    return web.json_response({"error": error}, status=status, headers=headers)


async def abort_held(request: web.Request) -> web.Response:
    """``POST /batches/abort``: end prompts that wait here, and wait for the engines' answers to those that were sent."""
    try:
        abort = HeldAbort.model_validate_json(await request.read())
    except ValidationError as error:
        return _refuse(400, f"{BATCHES_ABORT}: {error}")
    sent = await request.app[PARTS].held.abort(abort)
    return web.json_response(HeldAbortReply(sent=sent).model_dump())


routes = [
    *(web.post(GENERATE, generate), web.post(COMPLETIONS, completions), web.post(CHAT_COMPLETIONS, chat)),
    *(web.post(path, direct) for path in DIRECT_PATHS),
]
