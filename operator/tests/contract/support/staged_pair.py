"""An engine of two pods with transport Staged in the test's own process: the agents of both pods, and a stand-in with two ranks.

Rank 0 of the stand-in is in the head pod, rank 1 in the member pod: its verdicts are written there.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer

from sglang_rollout.agent.engine import Engine, RunFiles, StartBarrier
from sglang_rollout.agent.launch.member_pod import MemberPod, member_app
from sglang_rollout.agent.staged.member_service import run_staged_member
from sglang_rollout.credentials import Credentials
from sglang_rollout.plugin.install import LOADER
from sglang_rollout.proxy.address import Address
from sglang_rollout.testing import StandIn
from sglang_rollout.testing import staged as loader
from sglang_rollout.wire.staged import StagedCopy
from tests.contract.support.agent_here import PodHere, repeat, run_agent
from tests.contract.support.agent_pod import TOKEN, until
from tests.support.ports import free_port


@dataclass
class MemberHere:
    """The agent of the member pod. It can end, and start again with the same folders or with empty ones."""

    folder: Path
    head: Address
    address: Address = field(default_factory=lambda: Address("127.0.0.1", free_port()))
    data_address: Address = field(default_factory=lambda: Address("127.0.0.1", free_port()))
    number: int = 0
    """Number of the pod: a pod that was recreated has empty folders."""
    _stack: AsyncExitStack | None = None

    @property
    def files(self) -> RunFiles:
        return RunFiles(self.folder / "run" / "boot")

    @property
    def volume(self) -> Path:
        return self.folder / f"staged-{self.number}"

    @property
    def verdicts(self) -> Path:
        return self.folder / "verdicts"

    async def start(self) -> None:
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(Engine("http://127.0.0.1:1"))
            service = run_staged_member(volume=self.volume, verdicts=self.verdicts, state=self.folder / f"agent-{self.number}")
            staged = await stack.enter_async_context(service)
            place = {"rank": 1, "head": self.head, "own": self.address, "credentials": Credentials(TOKEN)}
            member = MemberPod(engine, StartBarrier(self.files), **place)  # type: ignore[arg-type]
            member.list_copies, member.data_address, member.up = staged.list_copies, self.data_address, True
            routes = staged.routes()
            app = member_app(member, name="e0", credentials=Credentials(TOKEN), model_path=None, more_routes=routes)
            await stack.enter_async_context(TestServer(app, port=self.address.port))
            await stack.enter_async_context(TestServer(staged.data_app(), port=self.data_address.port))
            task = asyncio.create_task(repeat(member.report))
            stack.push_async_callback(_end_task, task)
            self._stack = stack.pop_all()

    async def end(self) -> None:
        if self._stack is not None:
            await self._stack.aclose()
            self._stack = None


async def _end_task(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@dataclass
class PairHere:
    """Both pods of the engine."""

    engine: StandIn
    head: PodHere
    member: MemberHere

    async def restart_engine(self) -> None:
        """End all ranks, and start them as their containers do: each with a new boot ID."""
        self.engine.kill()
        for files in (RunFiles(self.head.boot_file), self.member.files):
            files.boot.parent.mkdir(exist_ok=True)
            files.boot.write_text(secrets.token_hex(4))
        self.engine.start()

    async def recreate_member(self) -> None:
        """Replace the member pod by an empty one; all ranks restart with it."""
        await self.member.end()
        self.member.number += 1
        await self.member.start()
        await self.restart_engine()

    async def staged(self) -> list[StagedCopy]:
        """Return the versions that the coordinator sees."""
        return (await self.head.status()).staged


@asynccontextmanager
async def run_pair(folder: Path, monkeypatch: pytest.MonkeyPatch, *, replicas: int = 1) -> AsyncIterator[PairHere]:
    """Run both agents and the engine for the length of the block.

    Args:
        folder: Folder of both pods.
        monkeypatch: Of the test.
        replicas: 2: one replica of the model in each pod; 1: one rank.
    """
    with StandIn(weight_version="base", loaders=[LOADER], tensor=2 // replicas, data=replicas) as engine:
        for pod in ("pod-0", "pod-1"):
            (folder / pod / "run").mkdir(parents=True)
            (folder / pod / "run" / "boot").write_text(secrets.token_hex(4))
        async with run_agent(folder / "pod-0", engine.url, pods=2, data=replicas) as head:
            member = MemberHere(folder / "pod-1", Address.parse(head.agent_url.removeprefix("http://")))
            _write_verdicts_in_the_pod_of_their_rank(monkeypatch, head, member)
            await member.start()
            try:
                pair = PairHere(engine, head, member)
                await until(lambda: _has_started(pair), 30, "both pods start the engine")
                yield pair
            finally:
                await member.end()


async def _has_started(pair: PairHere) -> bool:
    return all(RunFiles(files).go.exists() for files in (pair.head.boot_file, pair.member.files.boot))


def _write_verdicts_in_the_pod_of_their_rank(monkeypatch: pytest.MonkeyPatch, head: PodHere, member: MemberHere) -> None:
    """Let rank 1 write below the folder of its own pod, which its container mounts at the path that the request names."""
    really = loader._Request.write_verdict

    def write_verdict(request: loader._Request, **verdict: Any) -> None:
        path = Path(request.fields["verdicts"])
        if request.rank == 1:
            path = member.verdicts / path.relative_to(head.verdicts)
        really(loader._Request({**request.fields, "verdicts": str(path)}, request.rank), **verdict)

    monkeypatch.setattr(loader._Request, "write_verdict", write_verdict)
