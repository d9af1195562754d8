"""Send single prompts to smg or to an engine, and wait where nothing takes them now. An abort ends each wait (:mod:`.held`)."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from sglang_rollout.batches.aborted import Form
from sglang_rollout.batches.client import HOLD_SECONDS, NO_ENGINE, ConnectionLostError, UnreachableError
from sglang_rollout.batches.held import HeldPrompt
from sglang_rollout.batches.parts import HELD, PARTS, SHARE
from sglang_rollout.batches.split import Item, encode
from sglang_rollout.batches.streams import ItemError
from sglang_rollout.sglang.api import GENERATE
from sglang_rollout.sglang.smg_limits import should_bypass_smg
from sglang_rollout.wire.access import CALLER_HEADER, RELAYED_AUTHORIZATION_HEADER, RELAYED_CALLER_HEADER
from sglang_rollout.wire.ports import BROKEN_HEADER

ATTEMPTS = 2
"""Engines that get a prompt, if the first breaks off: no prompt ends more than two. The front has the same limit."""
HOP_HEADERS = frozenset(
    {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "proxy-authorization", "proxy-authenticate"}
    | {"host", "content-length", "expect", "accept-encoding", "content-type"}
    | {"authorization", CALLER_HEADER.lower(), RELAYED_CALLER_HEADER.lower(), RELAYED_AUTHORIZATION_HEADER.lower()}
)
"""Headers that belong to one connection, one body or the caller. Engines run model code, so no token reaches them."""
NO_WORKERS_SECONDS = 10.0
"""Longest wait for smg's first worker after its restart, which takes 0.1 s; its list is compared twice a second."""
_RETRY_SECONDS = 0.25
_SESSION_HEADERS = ("x-smg-routing-key", "x-session-id")
"""Headers that name a conversation, as smg is configured to read them."""
_KEPT_HEADERS = ("Content-Type", "Retry-After", BROKEN_HEADER)
"""Headers of a refused item that the answer to its batch has, too."""


@asynccontextmanager
async def send_item(request: web.Request, item: Item, samples: int) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield the answer 200 to one item of a batch. Raise ItemError for any other answer, and AbortedError if the item is aborted.

    A 404 comes from an smg that has just started and has no workers yet. It is retried, so that the batch is not lost.
    """
    data = encode(item)
    form = Form(rid=str(item.get("rid") or ""), samples=samples, logprobs=item.get("return_logprob") is True)
    send = ask_engine if should_bypass_smg(GENERATE, item) else ask_smg
    del item
    loop = asyncio.get_running_loop()
    end = None
    async with request[HELD].hold(form) as prompt, request.app[PARTS].client.batch_prompts:
        while True:
            async with send(request, data, prompt) as reply:
                if reply.status == 200:
                    yield reply
                    return
                if reply.status != 404:
                    headers = {name: reply.headers[name] for name in _KEPT_HEADERS if name in reply.headers}
                    raise ItemError(reply.status, await read_answer(request, reply), headers)
            end = end or loop.time() + NO_WORKERS_SECONDS
            if loop.time() >= end:
                raise UnreachableError(NO_ENGINE)
            await asyncio.sleep(_RETRY_SECONDS)


@asynccontextmanager
async def ask_smg(request: web.Request, data: bytes, prompt: HeldPrompt) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield the answer of smg. A prompt that meets closed gates because of a pause is sent again after the pause."""
    client, view = request.app[PARTS].client, request.app[PARTS].view
    attempt = 1
    while True:
        await _wait_out_pause(request, prompt)
        with prompt.sending():
            async with await client.post(client.url + request.path_qs, data, _forwarded_headers(request), hold=HOLD_SECONDS) as reply:
                if reply.status == 503 and (await view.read()).held:
                    continue
                if BROKEN_HEADER not in reply.headers or attempt == ATTEMPTS:
                    yield reply
                    return
        attempt += 1


@asynccontextmanager
async def ask_engine(request: web.Request, data: bytes, prompt: HeldPrompt) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield the answer of a serving engine. If the engine's gate has just closed, or the engine broke off, ask the next engine."""
    client = request.app[PARTS].client
    loop = asyncio.get_running_loop()
    end = loop.time() + HOLD_SECONDS
    attempt = 1
    while loop.time() < end:
        if await _wait_out_pause(request, prompt):
            end = loop.time() + HOLD_SECONDS
        for url in await _serving_urls(request):
            with prompt.sending():
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


async def read_answer(request: web.Request, reply: aiohttp.ClientResponse) -> bytes:
    """Return an answer. Its parts count as memory as they arrive, because one answer may hold many samples."""
    parts = []
    try:
        async for part in reply.content.iter_any():
            request[SHARE].add_answer(len(part))
            parts.append(part)
    except (aiohttp.ClientError, OSError) as error:
        raise ConnectionLostError(f"The engine broke the connection in the middle of an answer ({type(error).__name__}).") from None
    return b"".join(parts)


async def _wait_out_pause(request: web.Request, prompt: HeldPrompt) -> bool:
    """Wait while ``spec.state`` pauses the fleet, as the requests do that engines have. Return True if it was paused.

    The front ends the request after four hours.

    Raises:
        AbortedError: An abort names the prompt.
        UnreachableError: No engine may generate for another reason, which the message has.
    """
    prompt.refuse_aborted()
    view, was_paused = request.app[PARTS].view, False
    while (serving := await view.read()).held:
        if not serving.keeps_requests:
            raise UnreachableError(serving.held)
        was_paused = True
        await asyncio.sleep(_RETRY_SECONDS)
    return was_paused


async def _serving_urls(request: web.Request) -> list[str]:
    """Return the gates of serving engines in the order to ask: by session if the request names one, else round robin."""
    parts = request.app[PARTS]
    urls = list((await parts.view.read()).engines)
    session = next((request.headers[name] for name in _SESSION_HEADERS if name in request.headers), None)
    if session is not None:
        return sorted(urls, key=lambda url: hashlib.sha256(f"{session} {url}".encode()).digest())
    start = next(parts.client.turns) % len(urls) if urls else 0
    return urls[start:] + urls[:start]


def _forwarded_headers(request: web.Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name.lower() not in HOP_HEADERS} | {
        "Content-Type": "application/json",
        "Accept-Encoding": "identity",
    }
