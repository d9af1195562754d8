"""The gate, a real haproxy, refuses bodies above the limit, and bodies whose length it cannot know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from sglang_rollout.api.limits_spec import Limits
from tests.contract.support.agent_pod import Pod, run_pod
from tests.contract.support.stub_engine import StubEngine

pytestmark = pytest.mark.router

LIMITS = Limits(request_bytes=100_000)


@pytest.fixture
async def pod(stub: StubEngine, tmp_path: Path) -> AsyncIterator[Pod]:
    """Gate with low limits, and agent, in front of the stub. The gate is open."""
    async with run_pod(tmp_path, stub.url, limits=LIMITS) as made:
        await made.open_with_base()
        yield made


async def post(url: str, data: Any, path: str = "/generate") -> tuple[int, str]:
    async with aiohttp.ClientSession() as http, http.post(url + path, data=data, timeout=aiohttp.ClientTimeout(total=30)) as reply:
        body = await reply.json()
        return reply.status, body["error"]["code"] if "error" in body else ""


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/tokenize", "/classify"])
async def test_a_body_above_the_limit_reaches_no_engine(pod: Pod, stub: StubEngine, path: str) -> None:
    assert await post(pod.url, b'{"text": "' + b"x" * 100_000 + b'"}', path) == (400, "above_limit")
    assert not stub.asked.is_set()
    assert await pod.is_open()


async def send_chunks(url: str, method: str, pieces: int) -> bytes:
    """Return the beginning of the answer to a body without a length; empty if the connection breaks while the client sends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(url).port)
    try:
        writer.write(f"{method} /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        writer.write(b'a\r\n{"text": "\r\n' + b"2710\r\n%s\r\n" % (b"x" * 10_000) * pieces + b'2\r\n"}\r\n0\r\n\r\n')
        await writer.drain()
        return await reader.read(1000)
    except ConnectionError:
        return b""
    finally:
        writer.close()


# SGLang takes PUT, too.
@pytest.mark.parametrize("method", ["POST", "PUT"])
async def test_a_body_without_a_length_is_refused(pod: Pod, stub: StubEngine, method: str) -> None:
    answer = await send_chunks(pod.url, method, 1)
    assert answer.startswith(b"HTTP/1.1 411 "), answer
    assert b'"length_required"' in answer
    assert not stub.asked.is_set()


async def test_a_large_body_without_a_length_reaches_no_engine(pod: Pod, stub: StubEngine) -> None:
    answer = await send_chunks(pod.url, "POST", 40)
    assert answer[:13] in (b"", b"HTTP/1.1 411 ")
    assert not stub.asked.is_set()
    assert await pod.is_open()
