"""Images of a request reach the engine as they were sent: the real front, smg, coordinator and gate before a server that writes down what
it gets. No model that runs on a CPU here can see; whether SGLang understands an image is its own affair."""

from __future__ import annotations

import base64
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from sglang_rollout.api.limits_spec import Limits, MediaUrls
from sglang_rollout.sglang.api import DATA_PATHS
from sglang_rollout.testing import StandIn
from tests.contract.support.complete_fleet import CompleteFleet, complete_fleet
from tests.support.ports import free_port

pytestmark = pytest.mark.router

GENERATE, CHAT = "/generate", "/v1/chat/completions"
URL = "https://example.org/a.png"
SMALL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUg+/=="
LARGE = "data:image/jpeg;base64," + base64.b64encode(random.Random(1).randbytes(3_000_000)).decode()
FEW = {"max_new_tokens": 2}


VIDEO = {"type": "video_url", "video_url": {"url": URL, "fps": 2.0, "max_frames": 8}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
MANY = {"type": "image_url", "image_url": {"url": URL}, "modalities": "multi-images"}


def chat(*images: dict[str, Any], **more: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": "What do you see?"}, *({"type": "image_url", "image_url": image} for image in images)]
    return {"model": "m", "messages": [{"role": "user", "content": parts}], "max_tokens": 2, **more}


BODIES: list[tuple[str, dict[str, Any]]] = [
    (GENERATE, {"text": "a", "image_data": SMALL, "sampling_params": FEW}),
    (GENERATE, {"input_ids": [5, 6], "image_data": [SMALL, URL], "sampling_params": FEW}),
    (GENERATE, {"input_ids": [5, 6], "image_data": [LARGE], "modalities": ["image"], "sampling_params": FEW}),
    (GENERATE, {"image_data": [LARGE], "text": "a", "sampling_params": FEW}),
    (GENERATE, {"text": "a", "image_data": [[SMALL, URL]], "sampling_params": FEW}),
    (GENERATE, {"text": "a", "image_data": [{"format": "processor_output", "feature": [[0.5, 1e-7]]}], "sampling_params": FEW}),
    (GENERATE, {"text": "a", "video_data": [URL], "audio_data": [URL], "sampling_params": FEW}),
    (GENERATE, {"text": "a", "image_data": [SMALL], "sampling_params": FEW | {"logit_bias": {"7": 1.0}}}),
    (CHAT, chat({"url": SMALL})),
    (CHAT, chat({"url": URL, "detail": "high"}, {"url": LARGE})),
    (CHAT, chat({"url": SMALL, "detail": "low", "max_dynamic_patch": 4, "min_dynamic_patch": 2, "max_long_side_pixel": 9})),
    (CHAT, chat({"content_hash": "ab" * 32, "url": LARGE})),
    (CHAT, {"model": "m", "messages": [{"role": "user", "content": [VIDEO, AUDIO, MANY]}], "max_tokens": 2}),
    (CHAT, chat({"url": SMALL}, logit_bias={"7": 1})),
]  # fmt: skip


class Recorder:
    """A server before a stand-in, which answers data requests itself."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.got: list[dict[str, Any]] = []
        self._url, self._http = url, http

    async def handle(self, request: web.Request) -> web.Response:
        data = await request.read()
        if request.path in DATA_PATHS:
            self.got.append(await request.json())
            meta = {"id": "a", "finish_reason": {"type": "length", "length": 2}, "prompt_tokens": 1, "completion_tokens": 2}
            choice = {"index": 0, "message": {"role": "assistant", "content": "b"}, "finish_reason": "length"}
            usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
            answer = {"id": "a", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
            return web.json_response(answer if request.path == CHAT else {"text": "b", "output_ids": [1, 2], "meta_info": meta})
        headers = {"Content-Type": "application/json"} if data else {}
        async with self._http.request(request.method, self._url + request.path_qs, data=data, headers=headers) as reply:
            return web.Response(status=reply.status, body=await reply.read(), content_type=reply.content_type)


@pytest.fixture
async def recorded(tmp_path: Path) -> AsyncIterator[tuple[CompleteFleet, Recorder]]:
    with StandIn(weight_version="base") as engine:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
            recorder, port = Recorder(engine.url, http), free_port()
            app = web.Application(client_max_size=2**26)
            app.router.add_route("*", "/{tail:.*}", recorder.handle)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            async with complete_fleet(tmp_path, [f"http://127.0.0.1:{port}"], limits=Limits(media_urls=MediaUrls.ALLOWED)) as fleet:
                await fleet.serving(1)
                await fleet.generate({"input_ids": [5], "sampling_params": FEW})
                yield fleet, recorder
            await runner.cleanup()


async def test_an_engine_receives_images_unchanged(recorded: tuple[CompleteFleet, Recorder]) -> None:
    fleet, recorder = recorded
    model = (await fleet.ask("GET", "/v1/models")).body["data"][0]["id"]
    for path, sent in BODIES:
        body = sent | {"model": model} if path == CHAT else sent
        answer = await fleet.ask("POST", path, body)
        assert answer.status == 200, (str(body)[:300], answer)
        got = recorder.got.pop()
        assert {key: got.get(key) for key in body} == body, str(body)[:300]

    recorder.got.clear()
    images = [[SMALL, URL], None, [LARGE]]
    answer = await fleet.ask("POST", GENERATE, {"text": ["a", "b", "c"], "image_data": images, "sampling_params": FEW})
    assert answer.status == 200, answer
    found: dict[str, Any] = {}
    for got in recorder.got:
        texts = got["text"] if isinstance(got["text"], list) else [got["text"]]
        given = got["image_data"] if isinstance(got["text"], list) else [got.get("image_data")]
        found |= dict(zip(texts, given, strict=True))
    assert found == dict(zip("abc", images, strict=True)), "each prompt of a list has its own images"
