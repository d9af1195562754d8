"""The bandwidth that an engine's container measured is in the discovery document."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_rollout.agent import events as ev
from sglang_rollout.agent import state as s
from sglang_rollout.agent.engine import Engine
from sglang_rollout.api.intent import WantedEngine
from sglang_rollout.controller.render import names
from sglang_rollout.coordinator.update.engine import Engine as Member
from tests.contract.support.stub_engine import stub_engine


@pytest.mark.parametrize(("written", "expected"), [("412.3\n", 412.3), (None, None), ("", None)])
async def test_the_bandwidth_of_an_engine(tmp_path: Path, written: str | None, expected: float | None) -> None:
    boot = tmp_path / Path(names.BOOT_FILE).name
    boot.write_text("b1")
    if written is not None:
        (tmp_path / Path(names.ALL_REDUCE_FILE).name).write_text(written)
    async with stub_engine() as stub, Engine(stub.url, boot_file=boot) as engine:
        facts = await engine.identify("base", None)
    state, _ = ev.step(s.State(), ev.EngineIdentified(facts))
    status = s.status(state, name="e0", gate_open=True)
    member = Member(WantedEngine(name="e0"))
    member.status, member.misses = status, 0
    assert member.row().all_reduce == expected
