"""Reaching the trainer's store."""

import asyncio
import struct
from collections.abc import Awaitable, Callable

import pytest

from sglang_rollout.internal.reachability import preflight
from sglang_rollout.wire.agent import PreflightRequest
from tests.support.ports import free_port, needs_ipv6

Listener = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


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


async def _answer_as_torch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    validate, magic, ping, nonce = struct.unpack("=BIBI", await reader.readexactly(10))
    if (validate, magic, ping) == (0, 0x3C85F7CE, 13):
        writer.write(struct.pack("=I", nonce))
    await reader.read()
    writer.close()


async def _stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def _answer_as_http(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    writer.close()


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.read(10))
    writer.close()


async def test_a_store_answers_the_handshake() -> None:
    async with await asyncio.start_server(_answer_as_torch, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert (await preflight(PreflightRequest(host="127.0.0.1", port=port, deadline=5, handshake=True))).refusal is None


@pytest.mark.parametrize("listener", [_stay_silent, _answer_as_http, _echo, _nothing])
async def test_another_listener_is_no_store(listener: Listener) -> None:
    async with await asyncio.start_server(listener, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        reply = await preflight(PreflightRequest(host="127.0.0.1", port=port, deadline=0.3, handshake=True))
        assert reply.refusal is not None
        assert "accepts connections, but no TCPStore of torch answers there" in reply.refusal.message


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
