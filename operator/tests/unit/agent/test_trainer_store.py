"""Reaching the trainer's store."""

import asyncio

import pytest

from sglang_rollout.agent.reachability import preflight
from sglang_rollout.wire.agent import PreflightRequest
from tests.support.ports import free_port, needs_ipv6


async def _nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def test_a_listening_store_is_reached() -> None:
    server = await asyncio.start_server(_nothing, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert (await preflight(PreflightRequest(host="localhost", port=port, deadline=5))).refusal is None


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_a_store_at_an_ipv6_address_is_reached(host: str) -> None:
    server = await asyncio.start_server(_nothing, "::1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert (await preflight(PreflightRequest(host=host, port=port, deadline=5))).refusal is None


async def test_a_store_that_listens_late_is_reached() -> None:
    port = free_port()
    task = asyncio.create_task(preflight(PreflightRequest(host="127.0.0.1", port=port, deadline=10)))
    await asyncio.sleep(0.6)
    server = await asyncio.start_server(_nothing, "127.0.0.1", port)
    async with server:
        assert (await task).refusal is None


async def test_a_store_that_never_listens_is_reported_after_the_deadline() -> None:
    reply = await preflight(PreflightRequest(host="127.0.0.1", port=free_port(), deadline=0.5))
    assert reply.refusal is not None
    assert "connection refused, nothing listens there (tried for 0.5 s)" in reply.refusal.message


async def test_a_name_that_does_not_resolve_is_reported() -> None:
    reply = await preflight(PreflightRequest(host="nowhere.invalid", port=1, deadline=0.3))
    assert reply.refusal is not None
    assert "nowhere.invalid" in reply.refusal.message
