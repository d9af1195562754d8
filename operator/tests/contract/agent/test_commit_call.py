"""The call that ends an update on one engine: an agent in this process, a stub engine and a gate that exists in memory only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from bench.agents import MemoryGate

from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.app import make_app
from sglang_rollout.agent.engine import Engine
from sglang_rollout.agent.gate import GateView
from sglang_rollout.agent.record import RecordFile
from sglang_rollout.agent.update import Fence
from sglang_rollout.credentials import Credentials
from sglang_rollout.wire.agent import AgentStatus
from sglang_rollout.wire.ports import AGENT_ACK, AGENT_RUN, AGENT_SYNC, DEADLINE_HEADER, TERM_HEADER
from sglang_rollout.wire.states import Version
from tests.contract.support.agent_pod import TOKEN, until
from tests.contract.support.stub_engine import StubEngine
from tests.support.proven import prove

V1 = Version(run=1, step=1, label="1").model_dump()
BASE_WIRE = {"run": 0, "step": 0, "label": "base"}
GROUP = {"group_name": "g", "master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}


class Caller:
    """Calls the agent as a coordinator does."""

    def __init__(self, session: aiohttp.ClientSession, url: str, agent: Agent) -> None:
        self._session, self._url, self.agent = session, url, agent

    async def post(self, path: str, body: Any = None, *, term: int = 1, deadline: float = 30.0) -> tuple[int, dict[str, Any]]:
        data = json.dumps(body or {}).encode()
        headers = {TERM_HEADER: str(term), DEADLINE_HEADER: str(deadline)}
        proven = await prove(self._session, "POST", self._url + path, data, headers, token=TOKEN)
        async with self._session.post(self._url + path, data=data, headers=proven) as reply:
            return reply.status, await reply.json()

    async def update(self, *, up_to: str = AGENT_ACK) -> None:
        """Make the calls of an update to version 1, up to and including this one."""
        steps: list[tuple[str, Any]] = [
            ("/init_weights_update_group", GROUP),
            ("/pause_generation", {"mode": "retract"}),
            ("/begin_weight_update", {}),
            ("/update_weights_from_distributed", {"names": [], "group_name": "g"}),
            ("/end_weight_update", {}),
            (AGENT_ACK, {"version": V1, "boot_id": self.agent.status().boot_id, "cohort": ["e0"]}),
        ]
        for path, body in steps:
            status, answer = await self.post(path, body)
            assert status == 200, answer
            if path == up_to:
                return


@pytest.fixture
async def caller(stub: StubEngine, tmp_path: Path) -> AsyncIterator[Caller]:
    async with Engine(stub.url, boot_file=None) as client, aiohttp.ClientSession() as session:
        agent = Agent(name="e0", engine=client, gate=MemoryGate(tmp_path / "none"), record_file=RecordFile(tmp_path))
        async with TestServer(make_app(agent, credentials=Credentials(TOKEN), fence=Fence(agent, kill_file=None))) as server:
            await agent.observe()
            made = Caller(session, str(server.make_url("")).rstrip("/"), agent)
            assert (await made.post(AGENT_SYNC, {"committed": BASE_WIRE}))[1]["gate_open"]
            yield made


async def test_one_call_commits_continues_and_opens_the_gate(caller: Caller, stub: StubEngine) -> None:
    await caller.update()
    code, body = await caller.post(AGENT_RUN, {"committed": V1, "lease": 7.0})
    status = AgentStatus.model_validate(body)
    assert (code, status.committed, status.gate_open, status.paused) == (200, Version(**V1), True, False)
    assert stub.calls[-1] == "continue_generation"
    assert stub.bodies["continue_generation"] == {}
    assert caller.agent.limits.lease == 7.0


async def test_the_gate_opens_before_paused_requests_continue(caller: Caller, stub: StubEngine) -> None:
    """The next request of a session would move to another engine if the gate was closed when the paused one is answered."""
    await caller.update()
    stub.held["continue_generation"] = asyncio.Event()
    run = asyncio.create_task(caller.post(AGENT_RUN, {"committed": V1}))

    async def continues() -> bool:
        return stub.calls[-1] == "continue_generation"

    await until(continues, 30, "the engine is asked to continue")
    view = await caller.agent.gate.client.view()
    stub.held["continue_generation"].set()
    assert (view.up, (await run)[0]) == (True, 200)


async def test_an_acknowledgement_does_not_read_the_state_of_the_closed_gate(
    caller: Caller, stub: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await caller.update(up_to="/end_weight_update")
    await caller.agent.gate.settle()
    view, reads = caller.agent.gate.client.view, []

    async def counted() -> GateView:
        reads.append("view")
        return await view()

    monkeypatch.setattr(caller.agent.gate.client, "view", counted)
    body = {"version": V1, "boot_id": caller.agent.status().boot_id, "cohort": ["e0"]}
    status = AgentStatus.model_validate((await caller.post(AGENT_ACK, body))[1])
    assert (status.version, status.gate_open, reads) == (Version(**V1), False, [])


async def test_a_dirty_engine_applies_the_committed_version_and_does_not_resume(caller: Caller, stub: StubEngine) -> None:
    await caller.update(up_to="/end_weight_update")
    code, answer = await caller.post(AGENT_RUN, {"committed": V1})
    assert (code, "mixture" in answer["message"] or "in progress" in answer["message"]) == (409, True)
    assert "continue_generation" not in stub.calls
    status = (await caller.post(AGENT_SYNC, {"committed": None}))[1]
    assert (status["committed"], status["gate_open"], status["paused"]) == (V1, False, True)


async def test_an_engine_that_fails_to_resume_reports_why_and_stays_paused(caller: Caller, stub: StubEngine) -> None:
    await caller.update()
    stub.failing.add("continue_generation")
    assert await caller.post(AGENT_RUN, {"committed": V1}) == (400, {"success": False, "message": "continue_generation failed on purpose"})
    assert caller.agent.status().paused


async def test_a_slow_engine_is_answered_for_at_the_deadline_and_accepts_syncs_meanwhile(caller: Caller, stub: StubEngine) -> None:
    await caller.update()
    stub.held["continue_generation"] = asyncio.Event()
    code, answer = await caller.post(AGENT_RUN, {"committed": V1}, deadline=0.2)
    assert (code, "has not answered within 0.2 s" in answer["message"]) == (504, True)
    assert (await caller.post(AGENT_SYNC, {"committed": V1}))[1]["paused"]
    stub.held["continue_generation"].set()

    async def is_resumed() -> bool:
        return not (await caller.post(AGENT_SYNC, {"committed": V1}))[1]["paused"]

    await until(is_resumed, 30, "the engine resumes")


async def test_a_coordinator_with_a_lower_term_resumes_no_engine(caller: Caller, stub: StubEngine) -> None:
    await caller.update()
    await caller.post(AGENT_SYNC, {"committed": BASE_WIRE}, term=5)
    code, answer = await caller.post(AGENT_RUN, {"committed": V1}, term=4)
    assert (code, "term 5" in answer["message"]) == (409, True)
    assert "continue_generation" not in stub.calls
    assert caller.agent.status().committed == Version(**BASE_WIRE)


async def test_released_memory_keeps_the_engine_paused(caller: Caller, stub: StubEngine) -> None:
    await caller.post("/release_memory_occupation", {"tags": ["kv_cache"]})
    code, answer = await caller.post(AGENT_RUN, {"committed": BASE_WIRE})
    assert (code, "resume_memory_occupation comes first" in answer["message"]) == (409, True)
    assert "continue_generation" not in stub.calls


async def test_an_out_of_order_sync_does_not_reopen_the_gate(caller: Caller) -> None:
    """Its coordinator received no answer and has committed another version since."""
    assert (await caller.post(AGENT_SYNC, {"committed": BASE_WIRE, "sender": "c", "seq": 5}))[1]["gate_open"]
    assert not (await caller.post(AGENT_SYNC, {"committed": V1, "sender": "c", "seq": 7}))[1]["gate_open"]
    late = AgentStatus.model_validate((await caller.post(AGENT_SYNC, {"committed": BASE_WIRE, "sender": "c", "seq": 6}))[1])
    assert (late.gate_open, late.committed) == (False, Version(**V1))
