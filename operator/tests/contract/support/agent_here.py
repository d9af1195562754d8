"""The agent of one pod in the test's own process, with a gate that exists in memory only: it starts at once, also on a busy machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp.test_utils import TestServer
from bench.agents import MemoryGate

from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.app import make_app
from sglang_rollout.agent.engine import Engine
from sglang_rollout.agent.record import RecordFile
from sglang_rollout.agent.signatures import PublicKeys, Signatures
from sglang_rollout.agent.staged.service import run_staged_service
from sglang_rollout.agent.update import Fence
from sglang_rollout.agent.watchdog import SpecStateWatch
from sglang_rollout.credentials import Credentials
from tests.contract.support.agent_pod import TOKEN, Pod

_INTERVAL = 0.1


@dataclass
class PodHere(Pod):
    """A pod whose agent runs here. Requests for tokens bypass the gate."""

    running: Agent | None = None
    """The agent."""
    agent_url: str = ""
    data_url: str = ""

    @property
    def url(self) -> str:
        return self.agent_url

    async def is_closed(self) -> bool:
        return not await self.may_open()

    async def is_open(self) -> bool:
        return await self.may_open()


@asynccontextmanager
async def run_agent(folder: Path, engine_url: str, *, pipeline: int = 1, uid: str | None = None) -> AsyncIterator[PodHere]:
    """Run an agent with transport Staged for the length of the block. ``uid``: demand signatures for this rollout."""
    async with Engine(engine_url) as client, aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        pod = PodHere(folder, engine_url, http, uid=uid, pipeline=pipeline)
        signatures = Signatures(PublicKeys(pod.public_keys), uid) if uid is not None else None
        gate, records = MemoryGate(folder / "none"), RecordFile(folder / "agent")
        agent = Agent(name="e0", engine=client, gate=gate, record_file=records, signatures=signatures)
        pod.running = agent
        fence = Fence(agent, kill_file=None)
        service = run_staged_service(agent, volume=pod.volume, verdicts=pod.verdicts, state=folder / "agent", pipeline_size=pipeline)
        async with service as staged, TestServer(staged.data_app()) as data:
            app = make_app(agent, credentials=Credentials(TOKEN), fence=fence, staged=staged)
            async with TestServer(app) as server:
                pod.agent_url, pod.data_url = (str(made.make_url("")).rstrip("/") for made in (server, data))
                watches = (agent.observe, agent.gate.settle, fence.watch_lease, SpecStateWatch(agent).watch, staged.own_copy.watch)
                tasks = [asyncio.create_task(_repeat(watch)) for watch in (*watches, agent.watch_connection)]
                try:
                    yield pod
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)


async def _repeat(watch: Callable[[], Awaitable[None]]) -> None:
    while True:
        await watch()
        await asyncio.sleep(_INTERVAL)
