"""``spec.state: Asleep`` on one engine, with a real agent and a real gate, against SGLang and the stand-in.

SGLang releases nothing on a CPU, but it counts tags and ends if they are wrong. So a proxy reports --enable-memory-saver in its place, and
records the calls.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from sglang_rollout.wire.agent import AgentStatus
from sglang_rollout.wire.ports import AGENT_SYNC
from sglang_rollout.wire.states import BASE, EngineState
from tests.contract.support.agent_pod import BASE_WIRE, Answer, Pod, run_pod, until
from tests.contract.support.engine_servers import Server
from tests.support.ports import free_port

pytestmark = [pytest.mark.router, pytest.mark.engine, pytest.mark.timeout(420)]

WATCHED = ("/pause_generation", "/release_memory_occupation", "/resume_memory_occupation", "/continue_generation", "/abort_request")
ALL = ["kv_cache", "weights", "cuda_graph"]


class Saver:
    """Forwards all requests to the engine."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.port = free_port()
        self.calls: list[tuple[str, Any]] = []
        self._url, self._http = url, http

    async def handle(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        if request.path in WATCHED:
            self.calls.append((request.path.split("_")[0].strip("/"), await request.json()))
        async with self._http.request(request.method, self._url + request.path_qs, data=data, headers=_json(data)) as reply:
            if request.path == "/server_info":
                return web.json_response({**await reply.json(), "enable_memory_saver": True, "weight_version": "base"})
            if request.path == "/model_info":
                return web.json_response({**await reply.json(), "weight_version": "base"})
            return web.Response(status=reply.status, body=await reply.read(), content_type=reply.content_type)


def _json(data: bytes) -> dict[str, str]:
    return {"Content-Type": "application/json"} if data else {}


@pytest.fixture
async def saver(engine: Server) -> AsyncIterator[Saver]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0)) as http:
        made = Saver(engine.url, http)
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", made.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", made.port).start()
        yield made
        await runner.cleanup()


@pytest.fixture
async def pod(saver: Saver, tmp_path: Path) -> AsyncIterator[Pod]:
    async with run_pod(tmp_path, f"http://127.0.0.1:{saver.port}") as made:
        await made.open_with_base()
        yield made


async def sync(pod: Pod, state: str, drain: float = 300.0) -> AgentStatus:
    """Send a coordinator's sync."""
    answer = await pod.control(AGENT_SYNC, {"committed": BASE_WIRE, "spec_state": state, "drain": drain})
    assert answer.status == 200, answer.body
    return AgentStatus.model_validate(answer.body)


async def released(pod: Pod, tags: list[str], state: str) -> AgentStatus:
    async def is_released() -> bool:
        status = await sync(pod, state)
        return status.released == tags and status.paused == bool(tags)

    async def answered() -> bool:
        return "one control call at a time" not in str((await pod.control("/flush_cache", {})).body)

    await until(is_released, 60, f"released: {tags}")
    await until(answered, 60, "the engine has answered, after the record was written")
    return await sync(pod, state)


async def prove(pod: Pod, status: AgentStatus, **more: Any) -> Answer:
    return await pod.control("/agent/ack", {"version": BASE_WIRE, "boot_id": status.boot_id, "cohort": ["e0"], **more})


async def test_it_sleeps_when_its_requests_have_ended_and_serves_again_when_it_is_verified(pod: Pod, saver: Saver, engine: Server) -> None:
    tokens = engine.generate(8)["output_ids"]
    long = engine.start_long(800)
    status = await sync(pod, "asleep")
    assert not status.gate_open, "no new request"
    assert (await pod.generate()).status == 503
    assert (await asyncio.wrap_future(long))["meta_info"]["finish_reason"]["type"] == "length", "running requests finish"
    status = await released(pod, ALL, "asleep")
    assert saver.calls == [("pause", {"mode": "abort"}), ("release", {"tags": ALL})]
    assert (status.state, status.woken) == (EngineState.UNKNOWN, False)

    again = await pod.control("/resume_memory_occupation", {"tags": ["weights"]})
    assert (again.status, "spec.state: Asleep" in again.body["message"]) == (409, True), again
    for path in ("/begin_weight_update", "/weights_checker", "/continue_generation"):
        answer = await pod.control(path, {})
        assert (answer.status, "released" in answer.body["message"]) == (409, True), answer

    saver.calls.clear()
    status = await released(pod, [], "active")
    assert saver.calls == [("resume", {"tags": ALL}), ("continue", {})]
    assert (status.state, status.woken, status.gate_open) == (EngineState.UNKNOWN, True, False)
    assert (await prove(pod, status)).status == 409, "its weights have not been compared"
    assert (await prove(pod, status, verified=True)).status == 200
    status = await sync(pod, "active")
    assert (status.gate_open, status.version) == (True, BASE), status.message
    assert (await pod.generate()).status == 200
    assert engine.generate(8)["output_ids"] == tokens


async def test_requests_that_do_not_end_in_time_are_aborted(pod: Pod, engine: Server, saver: Saver) -> None:
    long = engine.start_long()
    await sync(pod, "asleep", drain=0.5)
    await until(lambda: _says(pod, ALL), 60, "it sleeps")
    assert (await asyncio.wrap_future(long))["meta_info"]["finish_reason"]["type"] == "abort"
    await until(
        lambda: _true([call for call, _ in saver.calls if call == "release"] == ["release"]), 30, "the engine has received the release"
    )
    await released(pod, [], "active")


async def _true(value: bool) -> bool:
    return value


async def _says(pod: Pod, tags: list[str]) -> bool:
    return (await sync(pod, "asleep", drain=0.5)).released == tags


async def test_a_restarted_agent_of_a_sleeping_engine_restores_its_memory_once(pod: Pod, saver: Saver) -> None:
    await released(pod, ALL, "asleep")
    saver.calls.clear()
    await pod.agent.end(signal.SIGKILL)
    await pod.agent.start()
    await until(pod.agent_answers, 30, "the agent is back")
    await until(pod.engine_up, 30, "the agent sees the engine")
    assert (await released(pod, ALL, "asleep")).released == ALL
    assert saver.calls == []
    await released(pod, [], "active")
    assert saver.calls == [("resume", {"tags": ALL}), ("continue", {})]


async def test_a_trainers_release_lasts_until_a_restore(pod: Pod, saver: Saver) -> None:
    assert (await pod.control("/release_memory_occupation", {"tags": ["kv_cache"]})).status == 200
    await released(pod, ["kv_cache"], "active")
    await released(pod, ALL, "asleep")
    saver.calls.clear()
    assert (await pod.control("/release_memory_occupation", {"tags": ["kv_cache"]})).status == 200
    assert (await pod.fence()).released == ALL, "a fence leaves it asleep"
    await released(pod, [], "active")
    assert [call for call, _ in saver.calls] == ["resume", "continue"], "it was released already"
