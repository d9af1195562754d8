"""An engine that answers without end: smg, the real one, keeps a bounded part of each answer in its memory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.contract.support.agent_pod import Process, until
from tests.support.ports import free_port

pytestmark = pytest.mark.router

MIB = 2**20
LIMIT, REQUESTS = 128 * MIB, 2


async def answer(request: web.Request) -> web.StreamResponse:
    """Answer a request for tokens without end, and other requests as SGLang does."""
    if request.path != "/generate":
        return web.json_response({"model_path": "tiny", "data": [{"id": "tiny"}]})
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    while True:
        await response.write(b" " * MIB)


@pytest.fixture
async def smg(tmp_path: Path) -> AsyncIterator[tuple[str, int]]:
    """Run smg as ``proxy smg`` does over one such engine. It tries each request once. Returns its URL and its process ID."""
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", answer)
    async with TestServer(app) as engine:
        listen = f"127.0.0.1:{free_port()}"
        line = ["proxy", "smg", "--listen", listen, "--metrics-listen", f"127.0.0.1:{free_port()}", "--policy", "RoundRobin"]
        line += ["--", "--worker-urls", str(engine.make_url("")).rstrip("/"), "--disable-retries"]
        process = Process(line, tmp_path / "smg.log")
        await process.start()
        try:
            async with aiohttp.ClientSession() as http:

                async def ready() -> bool:
                    try:
                        async with http.get(f"http://{listen}/readiness") as reply:
                            return reply.status == 200
                    except aiohttp.ClientError:
                        return False

                await until(ready, 60, "smg routes to the engine")
            assert process.process is not None
            yield f"http://{listen}", process.process.pid
        finally:
            await process.end()


def peak_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


async def test_an_answer_without_end_takes_a_bounded_part_of_smgs_memory(smg: tuple[str, int]) -> None:
    url, pid = smg
    before = peak_bytes(pid)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:

        async def ask(prompt: str) -> tuple[int, str]:
            async with http.post(f"{url}/generate", json={"text": prompt}) as reply:
                return reply.status, (await reply.json())["error"]["code"]

        assert await asyncio.gather(*(ask(str(number)) for number in range(REQUESTS))) == [(502, "upstream_response_too_large")] * REQUESTS
    assert peak_bytes(pid) - before < 2.2 * LIMIT * REQUESTS, "smg doubles its buffer while it reads"
