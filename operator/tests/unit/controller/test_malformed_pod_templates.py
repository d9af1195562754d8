"""A ``podTemplate`` or ``affinity`` that does not have the shape of a Pod is reported in the status, never raised."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_rollout.controller.decide.plan import make_plan
from sglang_rollout.controller.decide.view import build_fleet_view
from tests.support.allowed import ANYTHING
from tests.unit.controller.support.worlds import SETTINGS, condition, cr, status_of

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
DOWNLOADED = {"path": "/models/a", "volume": {"hostPath": "/d"}, "download": {"command": ["x"]}}


def engine(**fields: Any) -> dict[str, Any]:
    return {"podTemplate": {"spec": {"containers": [{"name": "engine", **fields}]}}}


CASES: list[tuple[dict[str, Any], str]] = [
    (engine(volumeMounts=["/ckpt"]), "spec.podTemplate.spec.containers[0].volumeMounts[0] must be a map of fields, not a text"),
    (engine(volumeMounts={"name": "a"}), "spec.podTemplate.spec.containers[0].volumeMounts must be a list, not a map of fields"),
    (engine(volumeMounts="x"), "volumeMounts must be a list, not a text"),
    (engine(volumeMounts=[{"name": ["x"], "mountPath": "/a"}]), "volumeMounts[0].name must be a text, not a list"),
    (engine(volumeMounts=[None]), "volumeMounts[0] must be a map of fields, not null"),
    (engine(ports=["8080"]), "spec.podTemplate.spec.containers[0].ports[0] must be a map"),
    (engine(ports=[{"containerPort": [1]}]), "ports[0].containerPort must be a number, not a list"),
    (engine(resources=[]), "spec.podTemplate.spec.containers[0].resources must be a map"),
    ({"podTemplate": {"spec": {"affinity": ["x"]}}}, "spec.podTemplate.spec.affinity must be a map of fields"),
    ({"podTemplate": {"spec": {"resourceClaims": "x"}}}, "spec.podTemplate.spec.resourceClaims must be a list"),
    (
        {"scheduling": {"affinity": {"podAffinity": [{"a": 1}]}, "topologyKey": "rack"}},
        "spec.scheduling.affinity.podAffinity must be a map",
    ),
    (
        {"scheduling": {"affinity": {"podAffinity": {REQUIRED: 5}}, "topologyKey": "rack"}},
        f"spec.scheduling.affinity.podAffinity.{REQUIRED} must be a list, not a number",
    ),
    (
        {"scheduling": {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": ["x"]}}}}},
        f"spec.scheduling.affinity.nodeAffinity.{REQUIRED}.nodeSelectorTerms[0] must be a map of fields, not a text",
    ),
    ({"router": {"podTemplate": {"spec": {"imagePullSecrets": ["x"]}}}}, "spec.router.podTemplate.spec.imagePullSecrets[0] must be a map"),
    ({"router": {"scheduling": {"affinity": {"podAffinity": 5}}}}, "spec.router.scheduling.affinity.podAffinity must be a map of fields"),
]


@pytest.mark.parametrize(("spec", "says"), CASES, ids=[says for _, says in CASES])
def test_misshapen_field_is_named(spec: dict[str, Any], says: str) -> None:
    seen = build_fleet_view(cr(**spec), [], [])
    assert make_plan(seen, SETTINGS).actions == ()
    found = condition(status_of(seen), "Ready")
    assert (found["status"], found["reason"]) == ("False", "InvalidSpec")
    assert says in found["message"]
    assert "Write it as in a Pod." in found["message"]


@pytest.mark.parametrize(
    "spec",
    [
        engine(resources=None, env=None, livenessProbe=None),
        engine(env=[{"name": "A", "valueFrom": {"x": 1}}], ports=[{"containerPort": 1}], volumeMounts=[{"name": "a", "mountPath": "/a"}]),
        {"podTemplate": {"spec": {"affinity": None, "nodeSelector": {"env": "prod", "ports": "none"}}}},
        {"podTemplate": {"spec": {"initContainers": [{"name": "download", "volumeMounts": [{"mountPath": "/x"}]}]}}, "model": DOWNLOADED},
        {"scheduling": {"affinity": {"podAffinity": {REQUIRED: [{"topologyKey": "a"}]}}, "topologyKey": "rack"}},
    ],
)
def test_well_shaped_template_is_planned(spec: dict[str, Any]) -> None:
    seen = build_fleet_view(cr(**spec), [], [])
    assert seen.invalid == ""
    assert make_plan(seen, SETTINGS, allowed=ANYTHING).actions
