"""CR in → objects out, as YAML that a person can read.

After a change that is meant: ``UPDATE_GOLDEN=1 pytest operator/tests/golden``, and look at the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from sglang_rollout.api.crdgen import to_yaml
from sglang_rollout.controller.decide.view import build_fleet_view
from sglang_rollout.controller.render import render_all
from sglang_rollout.controller.render.settings import Settings

HERE = Path(__file__).parent
SETTINGS = Settings(coordinator_image="example.org/coordinator:1", router_image="example.org/router:1")


@pytest.mark.parametrize("path", sorted((HERE / "in").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_objects_of_a_rollout(path: Path) -> None:
    fleet = build_fleet_view(yaml.safe_load(path.read_text()), [], [])
    assert fleet.rollout is not None, fleet.invalid
    rendered = "---\n".join(to_yaml(made) for made in render_all(fleet.rollout, SETTINGS, "t0ken", avoided=fleet.avoided_nodes))
    golden = HERE / "out" / path.name
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(rendered)
    assert rendered == golden.read_text()


def test_every_golden_file_has_its_input() -> None:
    assert {path.name for path in (HERE / "out").glob("*.yaml")} == {path.name for path in (HERE / "in").glob("*.yaml")}
