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
from sglang_rollout.agent.engine import Engine, RunFiles, StartBarrier
from sglang_rollout.agent.launch.head_pod import HeadPod
from sglang_rollout.agent.own_model import OwnModel
from sglang_rollout.agent.record import RecordFile
from sglang_rollout.agent.staged.service import run_staged_service
from sglang_rollout.agent.update import Fence
from sglang_rollout.agent.watchdog import SpecStateWatch
from sglang_rollout.credentials import Credentials
from sglang_rollout.proxy.address import Address
from sglang_rollout.staging.copies import Copies
from tests.contract.support.agent_pod import TOKEN, Pod
from tests.support.ports import free_port

_INTERVAL = 0.1


@dataclass
class PodHere(Pod):
    """A pod whose agent runs here. Requests for tokens bypass the gate."""

    running: Agent | None = None
    """The agent."""
    copies: Copies | None = None
    """Its copies of staged versions."""
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
async def run_agent(folder: Path, engine_url: str, *, pipeline: int = 1, data: int = 1, pods: int = 1) -> AsyncIterator[PodHere]:
    """Run an agent with transport Staged for the length of the block.

    Args:
        folder: Folder of the pod. With several pods its container has written a boot ID into it.
        engine_url: URL of the engine.
        pipeline: Pipeline stages of the engine.
        data: Replicas of the model in the engine.
        pods: Pods of the engine; this is its head pod.
    """
    boot_file = folder / "run" / "boot" if pods > 1 else None
    async with (
        Engine(engine_url, boot_file=boot_file) as client,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http,
    ):
        pod = PodHere(folder, engine_url, http, pipeline=pipeline, data=data)
        gate, records = MemoryGate(folder / "none"), RecordFile(folder / "agent")
        agent = Agent(name="e0", engine=client, gate=gate, record_file=records)
        pod.running = agent
        fence = Fence(agent, kill_file=None)
        gate_address, data_address = (Address("127.0.0.1", free_port()) for _ in range(2))
        head = None
        if boot_file is not None:
            barrier = StartBarrier(RunFiles(boot_file))
            head = HeadPod(agent, barrier, size=pods, own=gate_address, folder=folder / "agent", credentials=Credentials(TOKEN))
        service = run_staged_service(
            agent,
            volume=pod.volume,
            verdicts=pod.verdicts,
            state=folder / "agent",
            model=OwnModel(client, None),
            pipeline_size=pipeline,
            data_size=data,
            head_pod=head,
            data_address=data_address,
        )
        async with service as staged, TestServer(staged.data_app(), port=data_address.port) as server_of_data:
            app = make_app(agent, credentials=Credentials(TOKEN), fence=fence, staged=staged, head_pod=head)
            async with TestServer(app, port=gate_address.port) as server:
                pod.copies = staged._copies
                pod.agent_url, pod.data_url = (str(made.make_url("")).rstrip("/") for made in (server, server_of_data))
                watches = [agent.observe, agent.gate.settle, fence.watch_lease, SpecStateWatch(agent).watch, staged.own_copy.watch]
                watches += [head.watch] if head is not None else []
                watches += [staged.members.watch] if staged.members is not None else []
                tasks = [asyncio.create_task(repeat(watch)) for watch in (*watches, agent.watch_connection)]
                try:
                    yield pod
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)


async def repeat(watch: Callable[[], Awaitable[None]]) -> None:
    """Call a watch again and again."""
    while True:
        await watch()
        await asyncio.sleep(_INTERVAL)
