"""Each container mounts exactly the operator's volumes that docs/operations/containers.md lists, in every golden spec."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render.engines import engine_statefulsets
from sglang_rollout.controller.render.router import router_deployment
from sglang_rollout.controller.render.store import store_objects
from tests.support.paths import DOCS, GOLDEN_INPUTS
from tests.unit.controller.support.worlds import SETTINGS

PAGE = DOCS / "operations/containers.md"
SPECS = sorted(GOLDEN_INPUTS.glob("*.yaml"))
Row = tuple[str, str, str]
"""Container, volume, and ``read`` or ``write``."""


def documented() -> dict[Row, str]:
    """Return the folder of each row of the page."""
    rows: dict[Row, str] = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 5:
            for container in re.findall(r"`([a-z]+)`", cells[0]):
                rows[container, cells[1].strip("`"), cells[3]] = cells[2].strip("`")
    return rows


def mounted(spec: dict[str, Any]) -> Iterator[tuple[Row, str]]:
    """Return each mount in the operator's own pods, without the user's overlay, and its folder."""
    plain = {key: value for key, value in spec["spec"].items() if key != "podTemplate"}
    plain["router"] = {key: value for key, value in plain.get("router", {}).items() if key != "podTemplate"}
    metadata = {"name": "demo", "namespace": "default", "uid": "u", "generation": 1}
    rollout = SGLangRollout.model_validate({"metadata": metadata, "spec": plain})
    stores = [made for made in store_objects(rollout, SETTINGS) if made["kind"] == "StatefulSet"]
    for owner in (*engine_statefulsets(rollout, SETTINGS), router_deployment(rollout, SETTINGS), *stores):
        pod = owner["spec"]["template"]["spec"]
        for container in (*pod.get("initContainers", []), *pod["containers"]):
            for mount in container["volumeMounts"]:
                yield (container["name"], mount["name"], "read" if mount.get("readOnly") else "write"), mount["mountPath"]


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_container_mounts_only_what_the_table_lists(path: Any) -> None:
    table = documented()
    for row, folder in mounted(yaml.safe_load(path.read_text())):
        assert row in table, f"{row} is not in the table"
        assert folder == table[row] or row[1] == "rollout-model"


def test_every_row_of_the_table_is_true() -> None:
    found = {row for path in SPECS for row, _ in mounted(yaml.safe_load(path.read_text()))}
    assert set(documented()) == found


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_an_engine_pod_has_the_credential_of_its_engine_and_none_of_another_engine(path: Any) -> None:
    spec = yaml.safe_load(path.read_text())["spec"]
    rollout = SGLangRollout.model_validate(
        {"metadata": {"name": "demo", "namespace": "default", "uid": "u", "generation": 1}, "spec": spec}
    )
    for engine in engine_statefulsets(rollout, SETTINGS):
        volumes = engine["spec"]["template"]["spec"]["volumes"]
        (secret,) = (volume["secret"] for volume in volumes if str(volume.get("secret", {}).get("secretName")).startswith("demo-"))
        assert secret["secretName"] == "demo-credentials"
        assert secret["items"] == [{"key": engine["metadata"]["name"], "path": "token"}]


def test_an_engine_shares_no_volume_with_its_gate_and_no_credential_with_its_agent() -> None:
    table = documented()
    volumes = {container: {row[1] for row in table if row[0] == container} for container in ("engine", "gate", "agent")}
    assert not volumes["engine"] & volumes["gate"]
    assert volumes["engine"] & volumes["agent"] == {
        "run",
        "rollout-model",
        "rollout-plugin",
        "rollout-reports",
        "rollout-staged",
        "rollout-verdicts",
    }
    assert ("engine", "rollout-staged", "write") not in table
