"""Adapters of an agent that was restarted while its engine loaded or unloaded one: its state is unknown until it is unloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from sglang_rollout.agent import events as ev
from sglang_rollout.agent import state as s
from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.engine import Engine
from sglang_rollout.agent.gate import Gate, GateView
from sglang_rollout.agent.record import RecordFile
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.sglang.client import Reply
from sglang_rollout.wire.states import BASE, EngineState

FACTS = s.EngineFacts("b1", "default", "default")
HELD = s.EngineRecord(boot_id="b1", state=EngineState.CLEAN, version=BASE, label="default", committed=BASE, adapters={"old": "/old"})
ABSENT = "LoRA with name {} does not exist. Loaded LoRAs: odict_keys([])"


class FakeEngine:
    """Answers about adapters as SGLang does."""

    info: ClassVar[dict[str, Any]] = {"enable_lora": True}
    generates = True

    def __init__(self, *held: str) -> None:
        self.held = {*held}
        self.sick = ""

    def container_boot_id(self) -> str:
        return "b1"

    async def call(self, name: str, body: dict[str, Any]) -> Reply:
        adapter = body["lora_name"]
        error = self.sick
        if name == ControlCall.UNLOAD_ADAPTER and adapter not in self.held:
            error = error or ABSENT.format(adapter)
        if name == ControlCall.LOAD_ADAPTER and adapter in self.held:
            error = error or f"LoRA with name {adapter} already exists."
        if not error:
            self.held ^= {adapter}
        return Reply.json(400 if error else 200, {"success": not error, "error_message": error})


class FakeGate:
    """A gate that does what it is asked."""

    async def view(self) -> GateView:
        return GateView(1, True, True)

    async def set(self, *, is_open: bool) -> None:
        pass

    async def set_entry(self, key: str, value: str) -> None:
        pass


def restarted(folder: Path, engine: FakeEngine, call: str, name: str) -> Agent:
    """An agent whose predecessor ended in the middle of this call."""
    began, _ = ev.step(s.State(record=HELD, up=True), ev.CallBegan(call, name, ("/new",) if call == ControlCall.LOAD_ADAPTER else ()))
    record = RecordFile(folder)
    record.save(began.record)
    agent = Agent(name="e0", engine=cast(Engine, engine), gate=cast(Gate, FakeGate()), record_file=record)
    agent.dispatch(ev.EngineIdentified(FACTS))
    agent.dispatch(ev.CoordinatorCalled(1, BASE))
    return agent


@pytest.mark.parametrize("done", [True, False], ids=["the engine has done it", "it has not"])
@pytest.mark.parametrize(("call", "name"), [(ControlCall.LOAD_ADAPTER, "new"), (ControlCall.UNLOAD_ADAPTER, "old")])
async def test_an_adapter_of_an_interrupted_call_can_be_unloaded(tmp_path: Path, call: str, name: str, done: bool) -> None:
    engine = FakeEngine("old")
    if done:
        engine.held ^= {name}
    agent = restarted(tmp_path, engine, call, name)
    others = {"old": "/old"} if name == "new" else {}
    assert agent.status().adapters == {**others, name: ""}
    reply = await agent.control(ControlCall.UNLOAD_ADAPTER, {"lora_name": name}, 5)
    assert reply.ok
    assert agent.status().adapters == others
    assert name not in engine.held
    assert (await agent.control(ControlCall.LOAD_ADAPTER, {"lora_name": name, "lora_path": "/new"}, 5)).ok
    assert agent.status().adapters == {**others, name: "/new"}


async def test_an_adapter_that_cannot_be_unloaded_stays_unknown(tmp_path: Path) -> None:
    engine = FakeEngine("old", "new")
    agent = restarted(tmp_path, engine, ControlCall.LOAD_ADAPTER, "new")
    engine.sick = "out of memory"
    assert (await agent.control(ControlCall.UNLOAD_ADAPTER, {"lora_name": "new"}, 5)).status == 400
    assert agent.status().adapters == {"old": "/old", "new": ""}


async def test_the_unload_of_a_known_adapter_fails_if_the_engine_does_not_hold_it(tmp_path: Path) -> None:
    agent = restarted(tmp_path, FakeEngine(), ControlCall.LOAD_ADAPTER, "new")
    reply = await agent.control(ControlCall.UNLOAD_ADAPTER, {"lora_name": "old"}, 5)
    assert (reply.status, "does not exist" in reply.body.decode()) == (400, True)


def test_completed_calls_and_earlier_engine_processes_leave_no_adapter_unknown(tmp_path: Path) -> None:
    state = s.State(record=HELD, up=True)
    for event in (
        ev.CallBegan(ControlCall.LOAD_ADAPTER, "new", ("/new",)),
        ev.CallEnded(ControlCall.LOAD_ADAPTER, False, "b1", "new", ("/new",)),
        ev.CallBegan(ControlCall.PAUSE),
    ):
        state, _ = ev.step(state, event)
    assert ev.restore_state(state.record).record.adapters == {"old": "/old"}
    agent = restarted(tmp_path, FakeEngine(), ControlCall.LOAD_ADAPTER, "new")
    agent.dispatch(ev.EngineIdentified(s.EngineFacts("b2", "default", "default")))
    assert agent.status().adapters == {}
