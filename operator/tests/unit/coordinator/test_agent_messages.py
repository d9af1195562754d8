"""The order of syncs and commits to one agent, and the results of its answers."""

from __future__ import annotations

import asyncio
import socket
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sglang_rollout.coordinator.agents import Agents
from sglang_rollout.coordinator.update.events import Result, Send
from sglang_rollout.credentials import Credentials
from sglang_rollout.internal.proven_calls import take_proven_calls
from sglang_rollout.internal.refusals import log_refusals
from sglang_rollout.internal.requests import answer_refusals
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.agent import AgentStatus, SyncRequest
from sglang_rollout.wire.ports import AGENT_CHECKPOINT, AGENT_PREFLIGHT, AGENT_RUN, AGENT_SYNC
from sglang_rollout.wire.states import BASE, EngineState, Version

V1 = Version(run=1, step=1, label="1")
STATUS = AgentStatus(name="e0", boot_id="b", state=EngineState.CLEAN, version=V1, committed=V1, term=1, gate_open=True)


class SlowAgent:
    """Records its calls, and answers when the test sets an event."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []
        self.news = asyncio.Condition()
        self.answers = {AGENT_SYNC: asyncio.Event(), AGENT_RUN: asyncio.Event()}

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        async with self.news:
            self.heard.append((request.path, body["committed"]["step"]))
            self.news.notify_all()
        await self.answers[request.path].wait()
        return web.json_response(STATUS.model_dump(mode="json"))

    async def until_heard(self, number: int) -> None:
        async with asyncio.timeout(30), self.news:
            await self.news.wait_for(lambda: len(self.heard) >= number)


@asynccontextmanager
async def client_of(handle: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[Agents]:
    app = web.Application(middlewares=[answer_refusals])
    log_refusals(app)
    take_proven_calls(app, Credentials("t"))
    app.router.add_route("*", "/{tail:.*}", handle)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        client = Agents(address=lambda _: url, credentials=lambda _: Credentials("t"), term=lambda: 1)
        await client.start()
        try:
            yield client
        finally:
            await client.close()


@pytest.fixture
async def agent() -> SlowAgent:
    return SlowAgent()


@pytest.fixture
async def agents(agent: SlowAgent) -> AsyncIterator[Agents]:
    async with client_of(agent.handle) as client:
        yield client
        for event in agent.answers.values():
            event.set()


def body(version: Version) -> dict[str, Any]:
    return SyncRequest(committed=version).model_dump(mode="json")


@pytest.mark.parametrize("path", [AGENT_SYNC, AGENT_RUN])
async def test_a_commit_waits_for_a_running_sync_with_the_previous_version(agents: Agents, agent: SlowAgent, path: str) -> None:
    before = asyncio.create_task(agents.call("e0", AGENT_SYNC, body(BASE), 60))
    await agent.until_heard(1)
    commit = asyncio.create_task(agents.call("e0", path, body(V1), 60))
    other = asyncio.create_task(agents.call("e1", path, body(V1), 60))
    await agent.until_heard(2)  # the call to the other engine does not wait for the first engine
    assert agent.heard == [(AGENT_SYNC, 0), (path, 1)]
    for event in agent.answers.values():
        event.set()
    results = await asyncio.gather(before, commit, other)
    assert agent.heard == [(AGENT_SYNC, 0), (path, 1), (path, 1)]
    assert [result.agent for result in results] == [STATUS] * 3


async def test_a_commit_ends_at_its_deadline_behind_an_unanswered_sync(agents: Agents, agent: SlowAgent) -> None:
    before = asyncio.create_task(agents.call("e0", AGENT_SYNC, body(BASE), 60))
    await agent.until_heard(1)
    result = await agents.call("e0", AGENT_RUN, body(V1), 0.2)
    assert (result.ok, result.status) == (False, 0)
    assert agent.heard == [(AGENT_SYNC, 0)]
    before.cancel()


async def test_syncs_continue_while_an_engine_takes_long_to_resume(agents: Agents, agent: SlowAgent) -> None:
    agent.answers[AGENT_SYNC].set()
    commit = asyncio.create_task(agents.call("e0", AGENT_RUN, body(V1), 60))
    await agent.until_heard(1)
    assert await agents.sync("e0", SyncRequest(committed=V1)) == STATUS
    assert not commit.done()


@pytest.mark.parametrize(("slow", "answered"), [(0.2, True), (60.0, False)])
async def test_the_slowest_engines_get_a_limited_extension(
    agents: Agents, monkeypatch: pytest.MonkeyPatch, slow: float, answered: bool
) -> None:
    async def call(name: str, *_: object) -> Result:
        await asyncio.sleep(slow if name == "e1" else 0.1)
        return Result(ok=True, status=200)

    monkeypatch.setattr(agents, "call", call)
    async with asyncio.timeout(30):
        results = await agents.fan_out(Send("/end_weight_update", {"e0": {}, "e1": {}}, 60, patience=0.05))
    assert (results["e0"].ok, results["e1"].ok) == (True, answered)
    assert answered or "after 1 of 2 engines had answered" in results["e1"].message


DEEP = b"[" * 100_000
MALFORMED: list[tuple[str, bytes, str]] = [
    (ControlCall.CHECK_WEIGHTS.path, b'{"ranks": [{"parallelism_info": ["what"], "per_gpu_checksum": "a"}]}', "no checksum of each rank"),
    (
        ControlCall.CHECK_WEIGHTS.path,
        b'{"ranks": [{"parallelism_info": {"rank": Infinity}, "per_gpu_checksum": "a"}]}',
        "no checksum of each rank",
    ),
    (ControlCall.CHECK_WEIGHTS.path, b'{"ranks": ["what"]}', "no checksum of each rank"),
    (ControlCall.CHECK_WEIGHTS.path, b'{"ranks": 7}', "no checksum of each rank"),
    (ControlCall.CHECK_WEIGHTS.path, b'{"success": false, "message": "not now"}', "not now"),
    (ControlCall.CHECK_WEIGHTS.path, DEEP, "no checksum of each rank"),
    (AGENT_SYNC, b'{"name": []}', "is not valid"),
    (AGENT_SYNC, b"[1]", "is not valid"),
    (AGENT_SYNC, DEEP, "is not valid"),
    (AGENT_CHECKPOINT, b'{"ok": "perhaps"}', "is not valid"),
    (AGENT_PREFLIGHT, b'{"refusal": ["what"]}', "is not valid"),
]


@pytest.mark.parametrize(("path", "answer", "said"), MALFORMED)
async def test_a_malformed_answer_is_a_failed_call(path: str, answer: bytes, said: str) -> None:
    async def handle(_: web.Request) -> web.Response:
        return web.Response(body=answer, content_type="application/json")

    async with client_of(handle) as client:
        result = (await client.fan_out(Send(path, {"e0": {}}, 60)))["e0"]
    assert (result.ok, result.status, result.agent, result.checksums) == (False, 200, None, None)
    assert said in result.message


async def test_a_lone_surrogate_in_an_answer_becomes_a_question_mark() -> None:
    async def handle(_: web.Request) -> web.Response:
        return web.Response(body=b'{"success": false, "message": "no file /caf\\udce9 \\ud83d\\ude00"}', content_type="application/json")

    async with client_of(handle) as client:
        result = await client.call("e0", ControlCall.UPDATE_DISK.path, {}, 60)
    assert (result.ok, result.message) == (False, "no file /caf? \U0001f600")


async def test_a_large_body_is_not_copied_for_each_engine() -> None:
    body, engines = {"names": ["a" * 1000] * 8000}, [f"e{number}" for number in range(20)]
    with socket.create_server(("127.0.0.1", 0), backlog=64) as never_reads:
        client = Agents(
            address=lambda _: f"http://127.0.0.1:{never_reads.getsockname()[1]}", credentials=Credentials("t").derive, term=lambda: 1
        )
        await client.start()
        tracemalloc.start()
        try:
            results = await client.fan_out(Send("/abort_request", dict.fromkeys(engines, body), 2.0))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            await client.close()
    assert [result.ok for result in results.values()] == [False] * 20
    assert peak < 4 * 8_000_000, "bytes for 20 engines"
