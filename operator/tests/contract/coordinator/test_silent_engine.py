"""An engine becomes silent at the end of an update: the coordinator does not wait until the deadline of minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.api.weights_spec import Verify
from sglang_rollout.coordinator.update import outcome, sources, verify
from sglang_rollout.coordinator.update import steps as calls
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.ports import AGENT_ACK, AGENT_FENCE, AGENT_RUN
from tests.contract.support.coordinator_process import QUICK, Lab, fleet_lab

MINUTES = 300
SLOW = QUICK.model_copy(update={"update_seconds": MINUTES, "pause_seconds": MINUTES, "idle_seconds": MINUTES})
UPDATE = {"names": ["w"], "dtypes": ["float32"], "shapes": [[2]], "group_name": "g", "weight_version": 1}
STEPS = {
    "/end_weight_update": "could not end the session",
    ControlCall.CHECK_WEIGHTS.path: "could not be verified",
    AGENT_ACK: "did not acknowledge version 1/1",
}


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "DISK_PATIENCE_SECONDS", 0.5)
    for module in (calls, outcome, verify):
        monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.5)


async def push(lab: Lab) -> tuple[int, str, Any]:
    """Push a version. The lab's client waits 30 s for each answer."""
    assert (await lab.open_group())[0] == 200
    assert (await lab.post("/begin_weight_update", {}))[0] == 200
    assert (await lab.post("/update_weights_from_distributed", UPDATE))[0] == 200
    return await lab.post("/end_weight_update", {})


@pytest.mark.parametrize("step", STEPS)
async def test_a_fleet_with_enough_engines_commits_without_a_silent_one(tmp_path: Path, step: str) -> None:
    async with fleet_lab(tmp_path, 3, SLOW, verify=Verify.ALWAYS, min_committed=2) as lab:
        lab.agents[1].slow[step] = MINUTES
        status, _, body = await push(lab)
        assert (status, body["fleet"]["outcome"], list(body["fleet"]["fenced"])) == (200, "Partial", ["e1"])
        assert STEPS[step] in body["message"]
        assert "no answer for 0.5 s after 2 of 3 engines had answered" in body["message"]
        await lab.serving(2)

        async def fenced() -> bool:
            return bool(lab.agents[1].bodies_of(AGENT_FENCE))

        await lab.until("e1 is fenced", fenced)


@pytest.mark.parametrize("step", STEPS)
async def test_a_fleet_that_needs_all_engines_names_the_silent_one(tmp_path: Path, step: str) -> None:
    async with fleet_lab(tmp_path, 2, SLOW, verify=Verify.ALWAYS) as lab:
        lab.agents[1].slow[step] = MINUTES
        status, reason, body = await push(lab)
        assert (status, body["fleet"]["engine"]) == (400, "e1")
        assert f"engine e1 {STEPS[step]}" in reason
        assert (await lab.document())["committed"]["step"] == 0


async def test_an_engine_that_does_not_resume_after_a_commit_is_named(tmp_path: Path) -> None:
    async with fleet_lab(tmp_path, 3, SLOW) as lab:
        lab.agents[1].slow[AGENT_RUN] = MINUTES
        status, _, body = await push(lab)
        assert (status, body["fleet"]["outcome"]) == (200, "Committed")
        assert [found["success"] for found in body["fleet"]["engines"].values()] == [True, False, True]
        assert "no answer for 0.5 s after 2 of 3 engines had answered" in body["fleet"]["engines"]["e1"]["message"]
        assert lab.agents[1].bodies_of(AGENT_FENCE), "the fence resumes a clean engine"
        await lab.serving(3)


async def test_a_fleet_commits_without_an_engine_that_hangs_while_it_loads_a_checkpoint(tmp_path: Path) -> None:
    async with fleet_lab(tmp_path, 3, SLOW, min_committed=2) as lab:
        lab.agents[1].slow[ControlCall.UPDATE_DISK.path] = MINUTES
        status, _, body = await lab.post(ControlCall.UPDATE_DISK.path, {"model_path": "/checkpoints/1"})
        assert (status, list(body["fleet"]["fenced"])) == (200, ["e1"])
        assert "did not load /checkpoints/1: no answer for 0.5 s after 2 of 3" in body["fleet"]["fenced"]["e1"]
