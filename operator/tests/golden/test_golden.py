"""Custom resource in, objects out, as text that a person can read.

``out/minimal-cpu.yaml`` holds all objects of the base case. Every other case is rendered under the name of the base case, and its file
holds the difference from the base case. After an intended change: ``make golden``, then read the diff.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest
import yaml

from sglang_rollout.api.crdgen import to_yaml
from sglang_rollout.controller.decide.view import build_fleet_view
from sglang_rollout.controller.render import render_all
from sglang_rollout.controller.render.common import Settings

HERE = Path(__file__).parent
SETTINGS = Settings(coordinator_image="example.org/coordinator:1", router_image="example.org/router:1")


BASE = "minimal-cpu"
CASES = sorted(path.stem for path in (HERE / "in").glob("*.yaml"))


def golden_file(case: str) -> Path:
    return HERE / "out" / f"{case}{'.yaml' if case == BASE else '.diff'}"


def render(case: str) -> str:
    base, cr = (yaml.safe_load((HERE / "in" / f"{name}.yaml").read_text()) for name in (BASE, case))
    cr["metadata"] = {**cr["metadata"], **{key: base["metadata"][key] for key in ("name", "namespace", "uid") if key in base["metadata"]}}
    fleet = build_fleet_view(cr, [], [])
    assert fleet.rollout is not None, fleet.invalid
    return "---\n".join(to_yaml(made) for made in render_all(fleet.rollout, SETTINGS, "t0ken", avoided=fleet.avoided_nodes))


@pytest.mark.parametrize("case", CASES)
def test_the_objects_of_a_rollout(case: str) -> None:
    rendered = render(case)
    if case != BASE:
        lines = difflib.unified_diff(render(BASE).splitlines(), rendered.splitlines(), BASE, case, lineterm="", n=2)
        rendered = "".join(f"{line}\n" for line in lines)
    if os.environ.get("UPDATE_GOLDEN"):
        golden_file(case).write_text(rendered)
    assert rendered == golden_file(case).read_text()


def test_every_golden_file_has_its_input() -> None:
    assert {path.name for path in (HERE / "out").iterdir()} == {golden_file(case).name for case in CASES}
