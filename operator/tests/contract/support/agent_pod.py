"""One engine's pod without Kubernetes: haproxy as gate, the agent as a process, and the engine of the test."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from e2e.child import killed_with_parent

from sglang_rollout.api.limits_spec import Limits, limits_options
from sglang_rollout.wire.agent import AgentStatus
from sglang_rollout.wire.ports import AGENT_ACK, AGENT_FENCE, AGENT_GATE, AGENT_HEALTH, AGENT_SYNC, TERM_HEADER
from sglang_rollout.wire.states import Version
from tests.support.ports import free_port
from tests.support.proven import prove

TOKEN = "secret"
BASE_WIRE = {"run": 0, "step": 0, "label": "base"}


async def until(condition: Callable[[], Awaitable[bool]], seconds: float, what: str, every: float = 0.05) -> float:
    """Wait for a condition and return the seconds it took."""
    began = time.monotonic()
    while not await condition():
        assert time.monotonic() - began < seconds, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(every)
    return time.monotonic() - began


@dataclass
class Answer:
    status: int
    reason: str
    headers: dict[str, str]
    body: Any


@dataclass
class Process:
    """One of our commands as a child process."""

    args: list[str]
    log: Path
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self.log.open("ab") as log:
            command = killed_with_parent([sys.executable, "-m", "sglang_rollout.cli", *self.args])
            self.process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, cwd=self.log.parent)

    async def end(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), 5)

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)


@dataclass
class Pod:
    """Gate and agent of one engine."""

    folder: Path
    engine_url: str
    http: aiohttp.ClientSession
    with_boot_file: bool = False
    gate_port: int = field(default_factory=free_port)
    term: int = 1
    name: str = "e0"
    fleet_url: str | None = None
    takes_tensors: bool = False
    limits: Limits = field(default_factory=Limits)
    token: str = TOKEN
    """Credential of the engine."""
    data_port: int | None = None
    """Port of the agent for staged versions; None: the fleet has another transport."""
    pipeline: int = 1
    data: int = 1
    options: tuple[str, ...] = ()
    """Further options of the agent's command."""

    def __post_init__(self) -> None:
        (self.folder / "token").write_text(self.token)
        sock = str(self.folder / "gate.sock")
        agent = f"unix@{self.agent_socket}"
        engine = self.engine_url.removeprefix("http://")
        self.gate = Process(
            [
                *("proxy", "gate", "--listen", f"127.0.0.1:{self.gate_port}", "--engine", engine, "--agent", agent, "--socket", sock),
                *limits_options(self.limits),
            ],
            self.folder / "gate.log",
        )
        more = [*self.options, *(["--boot-file", str(self.boot_file)] if self.with_boot_file else [])]
        more += ["--fleet-url", self.fleet_url] if self.fleet_url else []
        more += ["--takes-tensors"] if self.takes_tensors else []
        if self.data_port is not None:
            more += ["--staging-volume", str(self.volume), "--verdicts-dir", str(self.verdicts)]
            more += ["--data-listen", f"127.0.0.1:{self.data_port}"]
            more += ["--pipeline-size", str(self.pipeline), "--data-size", str(self.data)]
        self.agent = Process(
            [
                *("agent", "--name", self.name, "--engine-url", self.engine_url, "--listen", agent, "--gate-socket", sock),
                *("--state-dir", str(self.folder / "agent"), "--token-file", str(self.folder / "token"), *more),
            ],
            self.folder / "agent.log",
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gate_port}"

    @property
    def agent_socket(self) -> Path:
        return self.folder / "agent.sock"

    @property
    def volume(self) -> Path:
        """Folder of staged versions."""
        return self.folder / "staged"

    @property
    def verdicts(self) -> Path:
        """Folder of the loader's verdicts."""
        return self.folder / "verdicts"

    @property
    def boot_file(self) -> Path:
        return self.folder / "run" / "boot"

    def boot(self, boot_id: str) -> None:
        """Write the boot ID, as the engine's container does at its start."""
        self.boot_file.parent.mkdir(exist_ok=True)
        self.boot_file.write_text(boot_id)

    async def start(self) -> None:
        await self.gate.start()
        await self.agent.start()
        await until(self.agent_answers, 40, "the agent answers through the gate")

    async def agent_answers(self) -> bool:
        try:
            return (await self.ask("GET", AGENT_HEALTH)).status == 200
        except aiohttp.ClientError:
            return False

    async def engine_up(self) -> bool:
        return (await self.ask("GET", "/health")).status == 200

    async def may_open(self) -> bool:
        return (await self.ask("GET", AGENT_GATE)).status == 200

    async def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        timeout = aiohttp.ClientTimeout(total=60)
        sent: dict[str, Any] = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.http.request(method, self.url + path, **sent, headers=headers, timeout=timeout) as reply:
            raw = await reply.read()
            try:
                document = await reply.json() if raw else None
            except (ValueError, aiohttp.ContentTypeError):
                document = raw.decode(errors="replace")
            return Answer(reply.status, reply.reason or "", dict(reply.headers), document)

    async def control(
        self, path: str, body: Any = None, *, term: int | None = None, token: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send a call as the coordinator does."""
        data = json.dumps({} if body is None else body).encode()
        given = {"Content-Type": "application/json", TERM_HEADER: str(self.term if term is None else term), **(headers or {})}
        all_headers = await prove(self.http, "POST", self.url + path, data, given, token=token or self.token)
        return await self.ask("POST", path, data, all_headers)

    async def status(self, committed: dict[str, Any] | None = None, **more: Any) -> AgentStatus:
        answer = await self.control(AGENT_SYNC, {"committed": committed, **more})
        assert answer.status == 200, answer.body
        return AgentStatus.model_validate(answer.body)

    async def open_with_base(self) -> None:
        await until(self.engine_up, 30, "the agent sees the engine")
        status = await self.status(BASE_WIRE)
        assert status.gate_open, status.message

    async def ack(self, version: Version, boot_id: str | None) -> Answer:
        return await self.control(AGENT_ACK, {"version": version.model_dump(), "boot_id": boot_id or "", "cohort": ["e0"]})

    async def fence(self, **more: float) -> AgentStatus:
        answer = await self.control(AGENT_FENCE, {"message": "the test aborts the update", **more})
        assert answer.status == 200, answer.body
        return AgentStatus.model_validate(answer.body)

    async def generate(self, tokens: int = 4, text: str = "alpha") -> Answer:
        return await self.ask("POST", "/generate", {"text": text, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}})

    async def is_closed(self) -> bool:
        answer = await self.generate()
        return answer.status == 503 and isinstance(answer.body, dict) and answer.body["error"]["code"] == "engine_closed"

    async def is_open(self) -> bool:
        return (await self.generate()).status == 200

    async def stream(self, tokens: int, first: asyncio.Event) -> tuple[int, bool]:
        """Return the number of events of a stream, and whether the stream was complete."""
        body = {"text": "alpha", "stream": True, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
        events = 0
        try:
            async with self.http.post(self.url + "/generate", json=body, timeout=aiohttp.ClientTimeout(total=90)) as reply:
                assert reply.status == 200, await reply.text()
                async for line in reply.content:
                    first.set()
                    events += line.startswith(b"data: {")
                    if line.startswith(b"data: [DONE]"):
                        return events, True
        except aiohttp.ClientError:
            return events, False
        return events, False


@asynccontextmanager
async def run_pod(
    folder: Path,
    engine_url: str,
    *,
    with_boot_file: bool = False,
    start: bool = True,
    name: str = "e0",
    fleet_url: str | None = None,
    takes_tensors: bool = False,
    limits: Limits | None = None,
    token: str = TOKEN,
    data_port: int | None = None,
    pipeline: int = 1,
    data: int = 1,
    options: tuple[str, ...] = (),
) -> AsyncIterator[Pod]:
    """Run a pod for the length of the block."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0)) as http:
        made = Pod(
            folder,
            engine_url,
            http,
            with_boot_file,
            name=name,
            fleet_url=fleet_url,
            takes_tensors=takes_tensors,
            limits=limits or Limits(),
            token=token,
            data_port=data_port,
            pipeline=pipeline,
            data=data,
            options=options,
        )
        try:
            if start:
                await made.start()
            yield made
        finally:
            for child in (made.gate, made.agent):
                if child.process is not None and child.process.returncode is None:
                    os.kill(child.process.pid, signal.SIGCONT)
                    await child.end()
