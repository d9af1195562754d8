"""A trainer pushes names that the engines' model does not have: one correct push repairs the fleet, also after an engine has restarted."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from e2e.engine import LabError, environment

from tests.contract.support.trainer_dialects import Fleet, fleet, model_of
from tests.support.paths import OPERATOR, TRAINERS

pytestmark = [pytest.mark.engine, pytest.mark.router, pytest.mark.timeout(600)]
SECONDS = 90.0


@pytest.fixture(scope="module", params=["sglang", "sglang-staged"])
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    with fleet(request.param, tmp_path_factory.mktemp("names")) as made:
        yield made


def push(lab: Fleet, version: int, scale: float, *, prefix: str = "", check: bool = True, more: str = "", less: str = "") -> dict[str, Any]:
    variables = environment.environment_variables()
    variables["PYTHONPATH"] = os.pathsep.join([str(OPERATOR), variables["PYTHONPATH"]])
    arguments = [lab.url, str(model_of(lab.kind)), str(version), str(scale), prefix, str(int(check)), more, less]
    command = [str(environment.python(make=False)), str(TRAINERS / "push_names.py"), *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def restart(lab: Fleet, index: int) -> None:
    engine = lab.engines[index]
    engine.kill()
    engine.start()
    engine.wait()


def test_one_correct_push_repairs_a_fleet_that_committed_wrong_names(lab: Fleet) -> None:
    base, _ = lab.generate()
    refused = push(lab, 10, 0.6, prefix="policy.")
    assert "is not in the engines' model" in refused["failed"]
    assert lab.committed()["label"] == "base"

    wrong = push(lab, 10, 0.6, prefix="policy.", check=False)
    assert (wrong["failed"], "do not fit the engines' model" in wrong["unchecked"]) == ("", True)
    lab.serving(2, SECONDS)
    assert lab.everywhere() == [(base, "10")] * 3, "SGLang ignores names that its model does not have"

    restart(lab, 1)
    right = push(lab, 11, 0.6)
    assert (right["failed"], right["unchecked"]) == ("", "")
    lab.serving(2, SECONDS)
    assert lab.everywhere() == [(lab.expected[0.6], "11")] * 3

    for index in (0, 1):
        restart(lab, index)
    assert push(lab, 12, 0.8)["failed"] == ""
    lab.serving(2, SECONDS)
    assert lab.everywhere() == [(lab.expected[0.8], "12")] * 3

    if lab.kind == "sglang-staged":  # an engine that holds version 12 may receive a part through a process group
        part = push(lab, 13, 0.6, less="model.norm.weight")["failed"]
        assert "failed in phase 'begin': the version lacks 1 of" in part
        assert part.endswith("Nothing was sent. A push of the same tensors fails again.")
        assert lab.everywhere() == [(lab.expected[0.8], "12")] * 3


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sglang-experts", "sglang-staged-experts"])
def test_fused_names_of_experts_are_refused_and_names_of_the_checkpoint_pass(kind: str, tmp_path: Path) -> None:
    """``state_dict()`` of transformers 5 has one tensor for all experts of a layer; SGLang ignores that name, and keeps the old experts."""
    with fleet(kind, tmp_path, number=1) as lab:
        base = lab.generate()
        refused = push(lab, 1, 0.6, more="model.layers.0.mlp.experts.gate_up_proj")
        assert "'model.layers.0.mlp.experts.gate_up_proj' is not in the engines' model" in refused["failed"]
        assert lab.everywhere() == [base] * 2
        done = push(lab, 1, 0.6)
        assert (done["failed"], done["unchecked"]) == ("", "")
        lab.serving(1, SECONDS)
        assert lab.everywhere() == [(lab.expected[0.6], "1")] * 2


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sglang-unchecked", "sglang-staged-unchecked"])
def test_a_new_run_repairs_a_fleet_whose_model_no_agent_knows(kind: str, tmp_path: Path) -> None:
    with fleet(kind, tmp_path) as lab:
        wrong = push(lab, 1, 0.6, more="policy.unknown")
        assert wrong["failed"] == ""
        assert "were not compared with the engines' model" in wrong["unchecked"]
        lab.serving(2, SECONDS)
        for index in (0, 1) if kind == "sglang-unchecked" else ():
            restart(lab, index)  # now no engine holds the committed version, with which the others could be compared
        refused = push(lab, 2, 0.8)
        assert "or open a run without them (POST /fleet/run)" in refused["failed"]

        assert requests.post(f"{lab.url}/fleet/run", timeout=10).status_code == 200
        right = push(lab, 2, 0.8)
        message = lab.document()["last_update"]["message"]
        assert lab.document()["serving"] == 0, "what the engines hold may be of two runs"
        for index in (0, 1):
            restart(lab, index)
        if kind == "sglang-staged-unchecked":
            assert right["failed"] == ""
            assert "has to restart before it loads the version, and its agent cannot restart it: do that by hand" in message
        else:
            assert "Restart the engine, which its agent cannot do here" in right["failed"]
            assert push(lab, 2, 0.8)["failed"] == ""
        lab.serving(2, SECONDS)
        assert lab.everywhere() == [(lab.expected[0.8], "2")] * 3

        restart(lab, 1)
        assert push(lab, 3, 0.6)["failed"] == "", "the wrong name is not needed any more"
        lab.serving(2, SECONDS)
        assert lab.everywhere() == [(lab.expected[0.6], "3")] * 3
