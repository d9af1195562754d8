"""The front, a real haproxy, sends bodies that smg would refuse or change to the batch server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from yarl import URL

from tests.contract.proxy.test_front import Front, front  # noqa: F401 - the fixture
from tests.contract.support.agent_pod import until

pytestmark = pytest.mark.router

LONG = "x" * 200_000
GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"

TO_SMG: list[tuple[str, Any]] = [
    (GENERATE, {"text": "a"}),
    (GENERATE, {"text": 'he said {"text": ["a"]} and {"input_ids": [[1]]}'}),
    (GENERATE, {"text": "{" + '"text"' + ": ["}),
    (GENERATE, {"text": "x" * 59_000}),
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
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u", "detail": "low"}}]}]}),
]
TO_BATCHES: list[tuple[str, Any]] = [
    (GENERATE, {"text": ["a", "b"]}),
    (GENERATE, {"text": []}),
    (GENERATE, {"sampling_params": [{}, {}], "text": ["a", "b"]}),
    (GENERATE, {"input_ids": [[1], [2]]}),
    (GENERATE, {"input_ids": [list(range(60_000)), [2]]}),
    (GENERATE, {"input_embeds": [[[0.5]], [[0.5]]]}),
    (GENERATE, {"image_data": LONG, "text": ["a"]}),
    (GENERATE, {"image_data": "x" * 50_000, "text": "a"}),  # cannot be seen: the batch server passes it on
    (GENERATE, {"text": LONG}),
    (GENERATE, {"input_ids": list(range(60_000))}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": LONG, "detail": "low"}}]}]}),
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
    async def pieces(*parts: bytes) -> Any:
        for number, part in enumerate(parts):
            if number:
                await asyncio.sleep(0.2)
            yield part

    for parts, expected in (((b'{"te', b'xt": ', b'["a"]}'), "batches"), ((b'{"te', b'xt": ', b'"a"}'), "smg")):
        length = {"Content-Length": str(sum(map(len, parts)))}
        timeout = aiohttp.ClientTimeout(total=30)
        async with front.http.post(front.url + GENERATE, data=pieces(*parts), headers=length, timeout=timeout) as reply:
            assert (await reply.json())["from"] == expected


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "head",
    [b"Content-Length: 500000", b"Transfer-Encoding: chunked", b"Content-Length: 60000" + 2 * (b"\r\nX-Long: " + b"x" * 6000)],
    ids=["long", "chunked", "long headers"],
)
async def test_a_long_body_that_stops_takes_no_place_at_smg(front: Front, path: str, head: bytes) -> None:  # noqa: F811
    _, writer = await asyncio.open_connection("127.0.0.1", URL(front.url).port)
    body = b'{"text": "' + b"x" * (69_990 if b"X-Long" not in head else 59_980)
    chunk = body if b"Length" in head else b"%x\r\n%s\r\n" % (len(body), body)
    front.smg.received, front.batches.received = {}, {}
    writer.write(b"POST %s HTTP/1.1\r\nHost: fleet\r\nX-Late: yes\r\n%s\r\n\r\n%s" % (path.encode(), head, chunk))

    async def has_arrived() -> bool:
        return any("x-late" in part.received for part in (front.smg, front.batches))

    await until(has_arrived, 10, "a process gets the request")
    assert "x-late" in front.batches.received
    writer.close()
