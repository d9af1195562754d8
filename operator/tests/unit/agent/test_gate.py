"""The entries that an agent writes into its gate, and its reaction to a gate that refuses them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.engine import Engine
from sglang_rollout.agent.gate import Gate, GateError, GateView
from sglang_rollout.agent.record import RecordFile
from sglang_rollout.agent.state import EngineRecord, State
from sglang_rollout.proxy.gate_map import TOKENIZER_KEY
from sglang_rollout.wire.states import BASE, EngineState, Version


class Haproxy:
    """Stands in for haproxy's stats socket. ``answers``: what it says to a ``set map`` of a key; None: nothing, ever."""

    def __init__(self) -> None:
        self.entries: dict[str, str] = {}
        self.answers: dict[str, str | None] = {}
        self.heard: list[str] = []
        self.is_open = False
        self.pid = 7
        self.connections = 0
        self.ended: list[asyncio.Event] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.ended.append(ended := asyncio.Event())
        self.connections += 1
        for command in (await reader.readline()).decode().strip().split("; "):
            self.heard.append(command.split()[3] if command.startswith("set map") else command)
            answer = self._answer(command)
            if answer is None:
                await reader.read()
            else:
                writer.write(answer.encode() + b"\n")
        writer.close()
        ended.set()

    def _answer(self, command: str) -> str | None:
        if command == "show info":
            return f"Name: HAProxy\nPid: {self.pid}\n"
        if command == "show servers state engine":
            return f"1\n2 engine 1 e 127.0.0.1 2 {0 if self.is_open else 1} 1 1\n"
        if command.startswith("set server"):
            if "server" in self.answers:
                return self.answers["server"]
            self.is_open = command.endswith("ready")
            return ""
        _, _, _, key, value = command.split()
        if key in self.answers:
            return self.answers[key]
        self.entries[key] = value
        return ""


def state_of(version: Version) -> State:
    record = EngineRecord(state=EngineState.CLEAN, version=version, committed=version)
    return State(record=record, up=True, informed=True)


@asynccontextmanager
async def agent_of(haproxy: Haproxy, folder: Path, *, timeout: float = 30) -> AsyncIterator[Agent]:
    async with await asyncio.start_unix_server(haproxy.serve, folder / "gate.sock"):
        engine: Any = SimpleNamespace(generates=True, info={"skip_tokenizer_init": True}, container_boot_id=lambda: None)
        gate = Gate(folder / "gate.sock", timeout=timeout)
        agent = Agent(name="e0", engine=cast("Engine", engine), gate=gate, record_file=RecordFile(folder))
        agent.state = state_of(BASE)
        yield agent
        for ended in haproxy.ended:
            await ended.wait()


async def test_a_gate_that_was_too_slow_receives_its_entries_again(tmp_path: Path) -> None:
    haproxy = Haproxy()
    haproxy.answers["tokenizer"] = None
    async with agent_of(haproxy, tmp_path, timeout=1) as agent:
        await agent.gate.settle()
        assert not haproxy.is_open, "it would serve by older entries"
        haproxy.answers.clear()
        agent.gate.client = Gate(agent.gate.client.socket, timeout=30)
        await agent.gate.settle()
    assert haproxy.entries["tokenizer"] == "no"
    assert haproxy.is_open


@pytest.mark.parametrize("answer", ["Unknown map identifier. Please use #<id> or <file>.\n", "entry not found.\n"])
async def test_an_older_gate_without_the_map_is_opened_and_asked_once(tmp_path: Path, answer: str) -> None:
    haproxy = Haproxy()
    haproxy.answers["tokenizer"] = answer
    async with agent_of(haproxy, tmp_path) as agent:
        await agent.gate.settle()
        await agent.gate.settle()
    assert haproxy.is_open
    assert haproxy.heard.count("tokenizer") == 1


@pytest.mark.parametrize("answer", [None, "Out of memory.\n"])
async def test_an_error_quotes_the_beginning_of_a_long_command(tmp_path: Path, answer: str | None) -> None:
    haproxy = Haproxy()
    haproxy.answers["tokenizer"] = answer
    async with agent_of(haproxy, tmp_path, timeout=1) as agent:
        with pytest.raises(GateError, match=r"set map .* tokenizer xxx") as raised:
            await agent.gate.client.set_entry(TOKENIZER_KEY, "x" * 15_000)
    assert len(str(raised.value)) < 2000


async def test_an_update_needs_few_connections_to_the_gate(tmp_path: Path) -> None:
    haproxy = Haproxy()
    async with agent_of(haproxy, tmp_path) as agent:
        await agent.gate.settle()
        haproxy.connections = 0
        agent.state = replace(agent.state, record=agent.state.record.model_copy(update={"state": EngineState.DIRTY}))
        await agent.gate.settle()
        assert (haproxy.is_open, agent.gate.view, haproxy.connections) == (False, GateView(pid=7, ready=False, up=False), 1)
        haproxy.heard.clear()
        agent.state = state_of(Version(run=1, step=1, label="v1"))
        await agent.gate.settle()
    assert (haproxy.is_open, haproxy.entries["version"], haproxy.connections) == (True, "v1", 4)
    assert [heard for heard in haproxy.heard if not heard.startswith(("show", "set server"))] == ["version"], "the rest has not changed"


async def test_a_new_haproxy_receives_all_entries(tmp_path: Path) -> None:
    haproxy = Haproxy()
    async with agent_of(haproxy, tmp_path) as agent:
        await agent.gate.settle()
        haproxy.heard.clear()
        haproxy.pid, haproxy.is_open = 8, False
        await agent.gate.settle()
    assert {"version", "tokenizer", "generates"} <= set(haproxy.heard)
    assert haproxy.is_open


async def test_a_gate_that_refuses_to_open_or_close_is_an_error(tmp_path: Path) -> None:
    haproxy = Haproxy()
    haproxy.answers["server"] = "No such server.\n"
    async with agent_of(haproxy, tmp_path) as agent:
        with pytest.raises(GateError, match=r"refused 'set server engine/e state maint': No such server"):
            await agent.gate.client.set(is_open=False)
