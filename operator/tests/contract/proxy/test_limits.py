"""The gate, a real haproxy, refuses requests above the limits and requests that it cannot read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sglang_rollout.api.limits_spec import Limits
from tests.contract.support.agent_pod import Pod, run_pod
from tests.contract.support.stub_engine import StubEngine

pytestmark = pytest.mark.router

LIMITS = Limits(samples_per_prompt=8, prompts_per_request=4, request_bytes=100_000, media_bytes=5000)
TOO_LARGE = "above_limit: The body has more than 100000 bytes; engine.limits.requestBytes raises it."


@pytest.fixture
async def pod(stub: StubEngine, tmp_path: Path) -> AsyncIterator[Pod]:
    """Gate with low limits, and agent, in front of the stub. The gate is open."""
    async with run_pod(tmp_path, stub.url, limits=LIMITS) as made:
        await made.open_with_base()
        yield made


async def post(url: str, data: Any, path: str = "/generate") -> tuple[int, str]:
    async with aiohttp.ClientSession() as http, http.post(url + path, data=data, timeout=aiohttp.ClientTimeout(total=30)) as reply:
        body = await reply.json()
        return reply.status, body["error"]["code"] + ": " + body["error"]["message"] if "error" in body else ""


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/generate", b'{"text": "a", "sampling_params": {"n": 9}}', "above_limit: n is 9, above the limit of 8; "),
        ("/generate", b'{"text": ["a", "b", "c", "d", "e"]}', "above_limit: The number of prompts in text is 5, above the limit of 4; "),
        ("/v1/chat/completions", b'{"model": "m", "messages": [], "n": 100}', "above_limit: n is 100, above the limit of 8; "),
        ("/generate", b'{"text": "a", "image_data": "' + b"x" * 9000 + b'"}', "above_limit: The media up to image_data has more than 5000"),
        ("/generate", b'{"text": "' + b"x" * 200_000 + b'"}', TOO_LARGE),
        ("/generate", b'{"\\u0069nput_ids": [-1]}', "unreadable_body: A key has letters that are written as escapes."),
        ("/generate", '{"input_ids": [-1]}'.encode("utf-16"), "unreadable_body: The body is not a JSON object in UTF-8."),
        ("/generate", b'{"input_ids": [5, "99999"]}', "unreadable_body: input_ids holds a string"),
        ("/classify", b'[{"text": "a"}]', "unreadable_body: The body is not a JSON object"),
        ("/generate", b'{"text": "a", "custom_logit_processor": "x"}', "not_accepted: custom_logit_processor is refused"),
        ("/generate", b'{"text": "a", "image_data": "/dev/zero"}', "not_accepted: image_data names a file"),
        ("/generate", b'{"text": "a", "image_data": "http://127.0.0.1:30001/flush_cache"}', "not_accepted: image_data is a URL"),
    ],
    ids=range(12),
)
async def test_gate_refuses_what_an_engine_must_not_get(pod: Pod, stub: StubEngine, path: str, body: bytes, expected: str) -> None:
    status, message = await post(pod.url, body, path)
    assert (status, message.startswith(expected)) == (400, True), message
    assert not stub.asked.is_set()
    assert await pod.is_open()


async def test_gate_cuts_a_body_without_length_at_the_limit(pod: Pod, stub: StubEngine) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"text": "'
        for _ in range(40):
            yield b"x" * 10_000
            await asyncio.sleep(0)
        yield b'"}'

    assert await post(pod.url, pieces()) == (400, TOO_LARGE)
    assert not stub.asked.is_set()
