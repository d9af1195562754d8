"""The batch server asks the coordinator about the caller of each request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sglang_rollout.batches.callers import CallerCheck
from sglang_rollout.wire.access import CALLER_HEADER, RELAYED_CALLER_HEADER
from sglang_rollout.wire.ports import FLEET_CALLER
from tests.support.ports import free_port

REQUEST = {CALLER_HEADER: "10.0.0.1", "Authorization": "Bearer secret", "Cookie": "private"}


@asynccontextmanager
async def coordinator(answer: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[CallerCheck]:
    app = web.Application()
    app.add_routes([web.get(FLEET_CALLER, answer)])
    async with TestServer(app) as server, CallerCheck(str(server.make_url("/"))) as check:
        yield check


async def test_the_coordinator_learns_path_address_and_token() -> None:
    seen: list[web.Request] = []

    async def allow(request: web.Request) -> web.Response:
        seen.append(request)
        return web.Response(status=204)

    async with coordinator(allow) as check:
        assert await check.find_refusal("/generate", REQUEST) is None
    (request,) = seen
    assert request.query["path"] == "/generate"
    assert (request.headers[RELAYED_CALLER_HEADER], request.headers["Authorization"]) == ("10.0.0.1", "Bearer secret")
    assert not {CALLER_HEADER, "Cookie"} & request.headers.keys()


async def test_the_refusal_of_the_coordinator_is_returned_unchanged() -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"code": "Unauthenticated"}}, status=401, headers={"WWW-Authenticate": "Bearer", "X-Other": "a"})

    async with coordinator(refuse) as check:
        refusal = await check.find_refusal("/generate", REQUEST)
    assert refusal is not None
    assert (refusal.status, refusal.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert refusal.body == b'{"error": {"code": "Unauthenticated"}}'
    assert "X-Other" not in refusal.headers


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer secret"}])
async def test_a_request_that_did_not_come_through_the_front_has_no_address(headers: dict[str, str]) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=204 if request.headers[RELAYED_CALLER_HEADER] else 403)

    async with coordinator(answer) as check:
        refusal = await check.find_refusal("/generate", headers)
    assert refusal is not None


async def test_without_a_coordinator_no_caller_is_allowed() -> None:
    async with CallerCheck(f"http://127.0.0.1:{free_port()}") as check:
        refusal = await check.find_refusal("/generate", REQUEST)
    assert refusal is not None
    assert (refusal.status, refusal.headers["Retry-After"]) == (503, "1")
