"""An engine of two pods without Kubernetes: real gates, agents and start scripts, and a relay between the pods that can be cut."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from sglang_rollout.api.engine_spec import NODE_RANK_ENV
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.start import GROUP_START_SCRIPT, HANDLER
from sglang_rollout.wire.ports import AGENT_ENGINE
from tests.contract.support.agent_pod import Pod, until
from tests.support.ports import free_port

ENGINE = Path(__file__).with_name("stub_rank.py")


@dataclass
class Relay:
    """A relay to a port. While it is cut, connections get neither a refusal nor an answer, as with a broken switch."""

    target: int
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=0)
        self._listener.setblocking(False)
        self._fill: list[socket.socket] = []
        self._open: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    def mend(self) -> None:
        for waiting in self._fill:
            waiting.close()
        self._fill.clear()
        self._accepting = asyncio.create_task(self._accept())

    def cut(self) -> None:
        """Fill the queue of unaccepted connections, so that the kernel drops handshakes."""
        if self._accepting is not None:  # None: the pod was never started
            self._accepting.cancel()
        for task in self._open:
            task.cancel()
        for _ in range(8):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", self.port))
            self._fill.append(filler)

    async def close(self) -> None:
        self.cut()
        await asyncio.gather(*self._open, return_exceptions=True)
        for waiting in self._fill:
            waiting.close()
        self._listener.close()

    async def _accept(self) -> None:
        while True:
            near, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            task = asyncio.create_task(self._carry(near))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _carry(self, near: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=near)
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        try:
            await asyncio.gather(_pipe(reader, forth), _pipe(back, writer))
        finally:
            writer.close()
            forth.close()


async def _pipe(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
    with suppress(OSError, RuntimeError):
        target.write_eof()


class Member:
    """One pod: gate, agent, and an engine container that restarts when it ends."""

    def __init__(self, folder: Path, rank: int, http: aiohttp.ClientSession, *, is_staged: bool = False, pipeline: int = 1) -> None:
        folder.mkdir()
        self.rank = rank
        self.engine_port = free_port()
        self.command = [sys.executable, str(ENGINE), str(self.engine_port), str(folder / "pid")]
        self.env: dict[str, str] = {}
        self.pod = Pod(folder, f"http://127.0.0.1:{self.engine_port}", http, with_boot_file=True)
        if is_staged:
            # Paths that are equal in both pods, as in containers: each process resolves them in the folder of its pod.
            volumes = ["--staging-volume", self.pod.volume.name, "--verdicts-dir", self.pod.verdicts.name]
            self.pod.agent.args += [*volumes, "--data-listen", f"127.0.0.1:{free_port()}"]
            self.pod.agent.args += ["--pipeline-size", str(pipeline)]
        self.relay = Relay(self.pod.gate_port)
        self.run = self.pod.boot_file.parent
        self.run.mkdir()
        self.starts = 0
        self._container: asyncio.subprocess.Process | None = None
        self._kubelet: asyncio.Task[None] | None = None

    async def start(self, leader: Relay) -> None:
        place = ["--nodes", "2", "--node-rank", str(self.rank)]
        self.pod.agent.args += [*place, "--leader", f"127.0.0.1:{leader.port}", "--advertise", f"127.0.0.1:{self.relay.port}"]
        self.relay.mend()
        self._kubelet = asyncio.create_task(self._keep_running())
        await self.pod.start()

    async def _keep_running(self) -> None:
        script = (HANDLER + GROUP_START_SCRIPT).replace(names.RUN_DIR, str(self.run))
        with (self.pod.folder / "engine.log").open("ab") as log:
            while True:
                self._container = await asyncio.create_subprocess_exec(
                    *("/bin/sh", "-c", script, "engine", *self.command),
                    env={**os.environ, **self.env, NODE_RANK_ENV: str(self.rank)}, cwd=self.pod.folder,
                    stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
                self.starts += 1
                await self._container.wait()
                self._end_container()
                await asyncio.sleep(0.2)

    def _end_container(self) -> None:
        if self._container is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._container.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill SGLang, as the kernel does without free memory."""
        os.kill(int((self.pod.folder / "pid").read_text()), signal.SIGKILL)

    async def up(self) -> bool:
        return (await self.pod.ask("GET", AGENT_ENGINE)).status == 200

    async def close(self) -> None:
        if self._kubelet is not None:
            self._kubelet.cancel()
            await asyncio.gather(self._kubelet, return_exceptions=True)
        self._end_container()
        if self._container is not None:
            await self._container.wait()
        for child in (self.pod.gate, self.pod.agent):
            if child.process is not None:
                await child.end()
        await self.relay.close()


@dataclass
class Pair:
    """The two pods of the engine."""

    leader: Member
    follower: Member

    @property
    def starts(self) -> tuple[int, int]:
        """Number of starts of each container."""
        return self.leader.starts, self.follower.starts

    async def runs(self) -> bool:
        return await self.leader.up() and await self.follower.up()

    async def wait_for_restart(self, before: tuple[int, int]) -> None:
        """Wait until both containers have restarted once and the engine runs."""
        wanted = (before[0] + 1, before[1] + 1)

        async def again() -> bool:
            return self.starts == wanted and await self.runs()

        await until(again, 60, f"both containers start once more: {wanted}, not {self.starts}", every=0.2)

    async def why(self) -> str:
        return (await self.leader.pod.status()).message


@asynccontextmanager
async def two_pods(folder: Path, *, is_staged: bool = False, pipeline: int = 1) -> AsyncIterator[Pair]:
    """Provide two pods that are not started yet. ``is_staged``: the fleet has transport Staged, with ``pipeline`` stages."""
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0)))
        made = [Member(folder / f"pod-{rank}", rank, http, is_staged=is_staged, pipeline=pipeline) for rank in range(2)]
        for member in made:
            stack.push_async_callback(member.close)
        yield Pair(*made)
