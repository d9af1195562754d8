"""An engine that ends during a call: the answer to the coordinator comes when the agent knows of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
from aiohttp.test_utils import TestServer
from bench.agents import MemoryGate

from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.app import make_app
from sglang_rollout.agent.engine import Engine
from sglang_rollout.agent.record import RecordFile
from sglang_rollout.agent.update import Fence
from sglang_rollout.credentials import Credentials
from sglang_rollout.wire.ports import AGENT_SYNC
from sglang_rollout.wire.reasons import GateReason
from tests.contract.agent.test_commit_call import BASE_WIRE, Caller
from tests.contract.support.agent_pod import until
from tests.contract.support.stub_engine import StubEngine


async def test_an_engine_that_ends_during_a_call_is_down_when_the_call_is_answered(stub: StubEngine, tmp_path: Path) -> None:
    """The coordinator then asks at once whether the engine is lost or has refused the call. No poll of the agent runs in between."""
    async with Engine(stub.url, boot_file=None) as client, aiohttp.ClientSession() as session:
        agent = Agent(name="e0", engine=client, gate=MemoryGate(tmp_path / "none"), record_file=RecordFile(tmp_path))
        fence = Fence(agent, kill_file=None)
        async with TestServer(make_app(agent, credentials=Credentials("secret"), fence=fence)) as server:
            await agent.observe()
            caller = Caller(session, str(server.make_url("")).rstrip("/"), agent)
            assert (await caller.post(AGENT_SYNC, {"committed": BASE_WIRE, "lease": 60.0}))[1]["gate_open"]
            stub.held["pause_generation"] = asyncio.Event()
            call = asyncio.create_task(caller.post("/pause_generation", {"mode": "retract"}))
            await until(lambda: _is("pause_generation" in stub.calls), 30, "the engine has the call")
            await stub.stop()
            assert (await call)[0] == 503
            assert agent.status().reason is GateReason.NOT_UP


async def _is(what: bool) -> bool:
    return what
