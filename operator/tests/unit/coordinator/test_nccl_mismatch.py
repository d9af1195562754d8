"""Refusals of a trainer whose NCCL differs from that of the engines."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_rollout.api.intent import WantedEngine
from sglang_rollout.coordinator.update.engine import Engine
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.nccl import check_nccl
from sglang_rollout.wire.agent import AgentStatus, Nccl
from sglang_rollout.wire.reasons import RefusedError
from sglang_rollout.wire.states import EngineState


def fleet(*engines: Nccl | None) -> Fleet:
    made = Fleet(name="fleet", term=1)
    for index, nccl in enumerate(engines):
        name = f"e{index}"
        status = AgentStatus(
            name=name, boot_id="b", state=EngineState.CLEAN, version=None, committed=None, term=1, gate_open=False, nccl=nccl
        )
        made.engines[name] = Engine(WantedEngine(name=name), status=status, misses=0)
    return made


def refused(engines: list[Nccl | None], trainer: dict[str, Any] | None, backend: str = "nccl") -> str:
    made = fleet(*engines)
    try:
        check_nccl(made, made.engines, backend, {"nccl": trainer} if trainer is not None else {})
    except RefusedError as refusal:
        return str(refusal)
    return ""


OLD, NEW = Nccl(version="2.27.3", settings={"NCCL_CUMEM_ENABLE": "0"}), Nccl(version="2.28.3", settings={"NCCL_CUMEM_ENABLE": "0"})


def test_versions_are_compared_with_the_trainer_and_among_engines() -> None:
    message = refused([OLD, OLD], {"version": "2.28.3"})
    assert message.startswith("the trainer has NCCL 2.28.3, engine e0 has NCCL 2.27.3: all ranks need the same version.")
    assert message.endswith("No engine has joined anything.")
    assert "engine e0 has NCCL 2.27.3, engine e1 has NCCL 2.28.3" in refused([OLD, NEW], None)
    assert refused([OLD, OLD], {"version": "2.27.3", "settings": {"NCCL_CUMEM_ENABLE": "0"}}) == ""


def test_the_setting_that_makes_ranks_hang_is_compared_and_no_other() -> None:
    message = refused([OLD], {"version": "2.27.3", "settings": {"NCCL_CUMEM_ENABLE": "1", "NCCL_DEBUG": "INFO"}})
    assert message.startswith("the trainer runs with NCCL_CUMEM_ENABLE=1, engine e0 with NCCL_CUMEM_ENABLE=0:")
    assert refused([OLD], {"version": "2.27.3", "settings": {"NCCL_DEBUG": "INFO"}}) == ""


@pytest.mark.parametrize("engines", [[None], [Nccl()], [OLD]])
def test_unknown_versions_are_not_compared(engines: list[Nccl | None]) -> None:
    assert refused(engines, None) == ""
    assert refused(engines, {}) == ""


def test_gloo_needs_no_nccl() -> None:
    assert refused([OLD], {"version": "2.28.3"}, backend="gloo") == ""


def test_malformed_facts_are_refused_with_the_field() -> None:
    assert refused([OLD], {"version": ["2"]}).startswith("nccl: version: ")
