"""Mounts in ``podTemplate`` that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from sglang_rollout.api.pod_template import PRIVATE_VOLUMES, RESERVED_VOLUMES, ROUTER_VOLUMES, STAGED_VOLUME, VERDICTS_VOLUME
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.overlay_mounts import find_forbidden_mount
from sglang_rollout.controller.decide.plan import make_plan
from sglang_rollout.controller.decide.view import build_fleet_view
from sglang_rollout.controller.render.engines import engine_statefulsets
from sglang_rollout.controller.render.router import router_deployment
from tests.support.paths import GOLDEN_INPUTS
from tests.unit.controller.support.worlds import SETTINGS, condition, cr, status_of

OWN = "it belongs to the operator's own containers."


def engine(name: str, path: str, container: str = "engine", kind: str = "containers") -> dict[str, Any]:
    return {"podTemplate": {"spec": {kind: [{"name": container, "volumeMounts": [{"name": name, "mountPath": path}]}]}}}


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        *(
            (engine(name, "/x"), f"the container engine must not mount the volume {name}: {OWN}")
            for name in (*PRIVATE_VOLUMES, STAGED_VOLUME, VERDICTS_VOLUME)
        ),
        (engine("control", "/x", "helper"), f"the container helper must not mount the volume control: {OWN}"),
        (engine("rollout-gate", "/x", "fetch", "initContainers"), f"the container fetch must not mount the volume rollout-gate: {OWN}"),
        *(({"router": engine(name, "/x", "smg")}, f"the container smg must not mount the volume {name}: {OWN}") for name in ROUTER_VOLUMES),
        (engine("data", "/data/../run/rollout"), "mount anything at /data/../run/rollout: write the path without the elements . and .."),
        (engine("data", "/data/./x", "helper"), "mount anything at /data/./x: write the path without"),
        ({"router": engine("data", "..", "smg")}, "mount anything at ..: write the path without"),
        *(
            (engine("data", path), f"the container engine must not mount anything at {path}: the operator starts and ends the engine")
            for path in ("/run/rollout", "/run/rollout/", "//run//rollout", "/run", "/", "/run/rollout/sub")
        ),
        (engine("data", "/run/rollout-staged"), "the engine loads staged versions from /run/rollout-staged."),
        (engine("data", "/run/rollout-verdicts/x"), "the agent reads how staged versions were loaded in /run/rollout-verdicts."),
    ],
    ids=str,
)
def test_a_forbidden_mount_is_named_and_nothing_is_done(spec: dict[str, Any], says: str) -> None:
    seen = build_fleet_view(cr(**spec), [], [])
    assert make_plan(seen, SETTINGS).actions == ()
    found = condition(status_of(seen), "Ready")
    assert (found["status"], found["reason"]) == ("False", "InvalidSpec")
    assert says in found["message"]


@pytest.mark.parametrize(
    "spec",
    [
        engine("data", "/data"),
        engine("node-shm", "/dev/shm"),
        engine("rollout-model", "/models", "helper"),
        engine("data", "/run/rollout-data"),
        engine("data", "/a..b/.hidden"),
        engine("data", "/run", "helper"),
        {"router": engine("logs", "/logs", "smg")},
    ],
    ids=str,
)
def test_other_mounts_are_accepted(spec: dict[str, Any]) -> None:
    assert find_forbidden_mount(SGLangRollout.model_validate(cr(**spec))) == ""


def test_exactly_the_volumes_of_the_operator_are_reserved() -> None:
    found: set[str] = set()
    of_router: set[str] = set()
    metadata = {"name": "demo", "namespace": "default", "uid": "u", "generation": 1}
    for path in GOLDEN_INPUTS.glob("*.yaml"):
        spec = {key: value for key, value in yaml.safe_load(path.read_text())["spec"].items() if key != "podTemplate"}
        spec["router"] = {key: value for key, value in spec.get("router", {}).items() if key != "podTemplate"}
        rollout = SGLangRollout.model_validate({"metadata": metadata, "spec": spec})
        for engines in engine_statefulsets(rollout, SETTINGS):
            found |= {volume["name"] for volume in engines["spec"]["template"]["spec"]["volumes"]}
        of_router |= {volume["name"] for volume in router_deployment(rollout, SETTINGS)["spec"]["template"]["spec"]["volumes"]}
    assert (found, of_router) == (set(RESERVED_VOLUMES), set(ROUTER_VOLUMES))
