"""The record on disk."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_rollout.agent import events as ev
from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.engine import Engine
from sglang_rollout.agent.gate import Gate, GateError
from sglang_rollout.agent.record import RecordError, RecordFile
from sglang_rollout.agent.state import EngineFacts, EngineRecord, State
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.sglang.client import Reply
from sglang_rollout.wire.states import BASE, EngineState

MEMORY = EngineRecord(boot_id="a", state=EngineState.CLEAN, version=BASE, label="base", cohort=["e0"], committed=BASE, term=7, groups=["g"])


def test_a_saved_record_is_loaded(tmp_path: Path) -> None:
    record = RecordFile(tmp_path / "made" / "here")
    assert record.load() == (EngineRecord(), "")
    record.save(MEMORY)
    assert record.load() == (MEMORY, "")
    assert [path.name for path in record.path.parent.iterdir()] == ["record.json"]


@pytest.mark.parametrize("text", ["", "{", '{"term": "high"}', "[]"])
def test_a_broken_record_is_reported_and_ignored(tmp_path: Path, text: str) -> None:
    file = RecordFile(tmp_path)
    file.path.write_text(text)
    record, complaint = file.load()
    assert record == EngineRecord()
    assert "cannot be used" in complaint


def test_a_half_written_record_leaves_the_old_record(tmp_path: Path) -> None:
    record = RecordFile(tmp_path)
    record.save(MEMORY)
    (tmp_path / "record.json.new").write_text('{"boot')
    assert record.load() == (MEMORY, "")


def test_a_folder_that_cannot_be_written_is_a_record_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"cannot be written: "):
        RecordFile(tmp_path / "file").save(MEMORY)


def test_text_that_cannot_be_written_is_a_record_error_and_leaves_the_old_record(tmp_path: Path) -> None:
    record = RecordFile(tmp_path)
    record.save(MEMORY)
    with pytest.raises(RecordError, match=r"cannot be written: "):
        record.save(MEMORY.model_copy(update={"adapters": {"a": "/caf\udce9"}}))
    assert record.load() == (MEMORY, "")


async def test_a_call_ends_even_if_its_result_cannot_be_written(tmp_path: Path) -> None:
    """Otherwise the agent would refuse all later calls, because this one never ends."""

    async def call(*_: object) -> Reply:
        return Reply.json(200, {"success": True})

    async def view() -> None:
        raise GateError("no gate here")

    engine: Any = SimpleNamespace(info={}, container_boot_id=lambda: None, call=call)
    gate: Any = SimpleNamespace(view=view)
    agent = Agent(name="e0", engine=engine, gate=gate, record_file=RecordFile(tmp_path))
    agent.state = State(record=MEMORY, up=True, informed=True)
    reply = await agent.start(ControlCall.LOAD_ADAPTER, {"lora_name": "a", "lora_path": "/caf\udce9"})
    assert (reply.ok, agent.state.record.pending) == (True, "")


def test_fields_of_a_newer_agent_are_ignored(tmp_path: Path) -> None:
    record = RecordFile(tmp_path)
    record.path.write_text(MEMORY.model_dump_json()[:-1] + ', "later": 1}')
    assert record.load() == (MEMORY, "")


@pytest.mark.parametrize("text", [None, "{"])
def test_the_gate_stays_closed_if_the_record_cannot_be_used(tmp_path: Path, text: str | None) -> None:
    record = RecordFile(tmp_path)
    if text is not None:
        record.path.write_text(text)
    agent = Agent(name="e0", engine=Engine("http://127.0.0.1:1"), gate=Gate(tmp_path / "gate"), record_file=record)
    agent.dispatch(ev.CoordinatorCalled(1, BASE))
    agent.dispatch(ev.EngineIdentified(EngineFacts("a", "base", "base")))
    assert agent.may_open() == (text is None)
