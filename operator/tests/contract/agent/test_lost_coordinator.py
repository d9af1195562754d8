"""An agent without calls of a coordinator gives up an unfinished update by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from bench.agents import MemoryGate

from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.app import make_app
from sglang_rollout.agent.engine import Engine
from sglang_rollout.agent.record import RecordFile
from sglang_rollout.agent.update import Fence
from sglang_rollout.credentials import Credentials
from sglang_rollout.wire.agent import SyncRequest
from sglang_rollout.wire.ports import AGENT_SYNC
from tests.contract.agent.test_commit_call import BASE_WIRE, Caller
from tests.contract.support.agent_pod import until
from tests.contract.support.stub_engine import StubEngine

UPDATE = "update_weights_from_distributed"
LEASE = 0.2


@pytest.fixture
async def pod(stub: StubEngine, tmp_path: Path) -> AsyncIterator[tuple[Caller, Fence, Path]]:
    kill = tmp_path / "kill"
    async with Engine(stub.url, boot_file=None) as client, aiohttp.ClientSession() as session:
        agent = Agent(name="e0", engine=client, gate=MemoryGate(tmp_path / "none"), record_file=RecordFile(tmp_path))
        fence = Fence(agent, kill_file=kill)
        async with TestServer(make_app(agent, credentials=Credentials("secret"), fence=fence)) as server:
            await agent.observe()
            caller = Caller(session, str(server.make_url("")).rstrip("/"), agent)
            assert (await caller.post(AGENT_SYNC, {"committed": BASE_WIRE, "lease": LEASE}))[1]["gate_open"]
            yield caller, fence, kill
            for event in stub.held.values():
                event.set()


def silent(agent: Agent, seconds: float) -> None:
    """Let the last call of a coordinator be this many seconds ago."""
    agent.last_call_at = time.monotonic() - seconds


async def test_a_clean_engine_that_was_paused_resumes(pod: tuple[Caller, Fence, Path], stub: StubEngine) -> None:
    caller, fence, kill = pod
    await caller.post("/pause_generation", {"mode": "retract"})
    caller.agent.limits = SyncRequest(committed=None, lease=60.0)
    silent(caller.agent, 30.0)
    await fence.watch_lease()
    assert caller.agent.status().paused, "the lease has not ended"
    silent(caller.agent, 61.0)
    await fence.watch_lease()
    status = caller.agent.status()
    assert (status.paused, status.gate_open, stub.calls.count("continue_generation")) == (False, True, 1)
    assert not kill.exists()


async def test_a_stuck_engine_in_an_update_stays_closed_and_its_restart_is_requested_once(
    pod: tuple[Caller, Fence, Path], stub: StubEngine
) -> None:
    caller, fence, kill = pod
    await caller.update(up_to="/begin_weight_update")
    stub.held[UPDATE] = asyncio.Event()
    call = asyncio.create_task(caller.post(f"/{UPDATE}", {"names": [], "group_name": "g"}))
    await until(lambda: _is(UPDATE in stub.calls), 30, "the engine has the tensors' call")
    silent(caller.agent, 1.0)
    caller.agent.limits = SyncRequest(committed=None, lease=LEASE)
    watching = asyncio.create_task(fence.watch_lease())
    await until(lambda: _is(kill.exists()), 30, "the kill file is there")
    written = kill.stat().st_ino
    silent(caller.agent, 1.0)
    await fence.watch_lease()
    assert (kill.stat().st_ino, caller.agent.status().gate_open) == (written, False)
    stub.held[UPDATE].set()
    await asyncio.gather(watching, call)
    await until(lambda: _is(caller.agent.giving_up_since is None), 30, "it has given up")
    assert not kill.exists(), "the engine has answered"
    assert (caller.agent.status().state, caller.agent.status().gate_open) == ("dirty", False)


async def _is(what: bool) -> bool:
    return what
