"""The front, a real haproxy, sends bodies that smg would refuse or change to the batch server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from tests.contract.proxy.test_front import Front, front  # noqa: F401 - the fixture

pytestmark = pytest.mark.router

LONG = "x" * 200_000
GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"

TO_SMG: list[tuple[str, Any]] = [
    (GENERATE, {"text": "a"}),
    (GENERATE, {"text": 'he said {"text": ["a"]} and {"input_ids": [[1]]}'}),
    (GENERATE, {"text": "{" + '"text"' + ": ["}),
    (GENERATE, {"text": LONG}),
    (GENERATE, {"input_ids": list(range(60_000))}),
    (GENERATE, {"input_ids": [], "session_params": {"id": "s"}}),
    (GENERATE, {"sampling_params": {"n": 4, "stop": ["a"]}, "text": "a", "rid": "r"}),
    (GENERATE, {"sampling_params": {}}),
    (COMPLETIONS, {"model": "m", "prompt": "a"}),
    (COMPLETIONS, {"model": "m", "prompt": ["a", "b"]}),
    (GENERATE, {"text": '"logit_bias": {', "sampling_params": {"n": 64, "stop": ["a", "b", "c", "d", "e"], "custom_params": {"x": 1}}}),
    (COMPLETIONS, {"model": "m", "prompt": "a", "logit_bias": {"7": 1}, "stop": ["a", "b", "c"]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ["a"]}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": '"n": 16'}], "n": 8, "temperature": 1.0, "top_k": -1, "top_logprobs": 5}),
    (CHAT, {"model": "org/m", "messages": [{"role": "user", "content": '"model": "m:a"'}]}),
    (GENERATE, {"text": "a", "lora_path": "math"}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": LONG, "detail": "low"}}]}]}),
]
TO_BATCHES: list[tuple[str, Any]] = [
    (GENERATE, {"text": ["a", "b"]}),
    (GENERATE, {"text": []}),
    (GENERATE, {"sampling_params": [{}, {}], "text": ["a", "b"]}),
    (GENERATE, {"input_ids": [[1], [2]]}),
    (GENERATE, {"input_ids": [list(range(60_000)), [2]]}),
    (GENERATE, {"input_embeds": [[[0.5]], [[0.5]]]}),
    (GENERATE, {"image_data": LONG, "text": ["a"]}),
    (GENERATE, {"image_data": LONG, "text": "a"}),  # cannot be seen: the batch server passes it on
    (COMPLETIONS, {"model": "m", "prompt": [1, 2]}),
    (COMPLETIONS, {"model": "m", "prompt": [[1], [2]]}),
    (GENERATE, {"input_ids": list(range(4000)), "sampling_params": {"logit_bias": {"7": 1}}}),
    (GENERATE, {"text": "a", "sampling_params": {"stop_regex": "a"}}),
    (GENERATE, {"text": "a", "sampling_params": {"n": 1, "structural_tag": "{}"}}),
    (COMPLETIONS, {"model": "m", "prompt": "a", "n": 200}),
    (CHAT, {"messages": [], "n": 16}),
    (CHAT, {"messages": [], "temperature": 2.5}),
    (CHAT, {"messages": [], "top_logprobs": 50}),
    (CHAT, {"messages": [], "top_k": 0}),
    (CHAT, {"messages": [], "stop": ["a", "b", "c", "d", "e"]}),
    (CHAT, {"messages": [], "model": "org/m:math"}),
    (COMPLETIONS, {"model": "m:math", "prompt": "a"}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u", "max_dynamic_patch": 4}}]}]}),
]


async def whereto(front: Front, path: str, body: str) -> object:  # noqa: F811
    status, answer, _ = await front.ask(path, body)
    assert status == 200
    return answer["from"]


@pytest.mark.parametrize(("path", "body"), TO_SMG, ids=range(len(TO_SMG)))
async def test_one_prompt_goes_to_smg(front: Front, path: str, body: Any) -> None:  # noqa: F811
    for text in (json.dumps(body), json.dumps(body, indent=2), json.dumps(body, separators=(",", ":"))):
        assert await whereto(front, path, text) == "smg"


@pytest.mark.parametrize(("path", "body"), TO_BATCHES, ids=range(len(TO_BATCHES)))
async def test_request_that_smg_would_refuse_goes_to_the_batch_server(front: Front, path: str, body: Any) -> None:  # noqa: F811
    for text in (json.dumps(body), json.dumps(body, indent=2), json.dumps(body, separators=(",", ":"))):
        assert await whereto(front, path, text) == "batches"


async def test_front_waits_for_a_body_until_it_sees_the_prompt(front: Front) -> None:  # noqa: F811
    released = asyncio.Event()

    async def pieces(*parts: bytes) -> Any:
        for number, part in enumerate(parts):
            if number:
                await asyncio.sleep(0.2)
            yield part
        released.set()

    for parts, expected in (
        ((b'{"te', b'xt": ', b'["a"]}'), "batches"),
        ((b'{"te', b'xt": ', b'"a"}'), "smg"),
        ((b'{"text": "' + LONG.encode(), LONG.encode(), b'"}'), "smg"),
    ):
        async with front.http.post(front.url + GENERATE, data=pieces(*parts), timeout=aiohttp.ClientTimeout(total=30)) as reply:
            assert (await reply.json())["from"] == expected
    assert released.is_set()
