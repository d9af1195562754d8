"""CPU and memory of the operator's own containers, in every golden case and with the user's values."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from sglang_rollout.api.engine_spec import Resources
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.batches.memory import DEFAULT_LIMIT_BYTES, Budget
from sglang_rollout.controller.render import render_all
from sglang_rollout.controller.render.common import parse_quantity
from sglang_rollout.controller.render.resources import own_resources
from sglang_rollout.proxy.config import front_config
from tests.support.paths import REPOSITORY
from tests.unit.controller.support.worlds import SETTINGS, cr
from tests.unit.proxy.test_config import FRONT

OWN = {"gate", "agent", "front", "smg", "coordinator", "batches", "download"}
CASES = sorted((REPOSITORY / "operator/tests/golden/in").glob("*.yaml"))


def containers(resource: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the operator's own containers in all objects of a rollout."""
    objects = render_all(SGLangRollout.model_validate(resource), SETTINGS, "t")
    pods = [made["spec"]["template"]["spec"] for made in objects if "template" in made.get("spec", {})]
    found = [container for pod in pods for container in [*pod.get("initContainers", ()), *pod["containers"]]]
    return [container for container in found if container["name"] in OWN]


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_own_container_has_requests_and_a_memory_limit(path: Any) -> None:
    resource = yaml.safe_load(path.read_text())
    resource["metadata"].setdefault("uid", "u")
    for container in containers(resource):
        resources = container["resources"]
        request, limit = (parse_quantity(resources[part]["memory"]) for part in ("requests", "limits"))
        assert request is not None
        assert limit is not None
        assert request <= limit, container["name"]


def test_cpu_has_no_limit_by_default() -> None:
    assert [container["name"] for container in containers(cr()) if "cpu" in container["resources"]["limits"]] == []


@pytest.mark.parametrize(
    ("given", "requests", "limits"),
    [
        ({}, {"cpu": "50m", "memory": "64Mi"}, {"memory": "512Mi"}),
        ({"requests": {"cpu": "2"}}, {"cpu": "2", "memory": "64Mi"}, {"memory": "512Mi"}),
        ({"limits": {"memory": "3Gi", "cpu": "1"}}, {"cpu": "50m", "memory": "64Mi"}, {"memory": "3Gi", "cpu": "1"}),
        ({"requests": {"memory": "4Gi"}}, {"cpu": "50m", "memory": "4Gi"}, {"memory": "4Gi"}),
        ({"limits": {"memory": "32Mi"}}, {"cpu": "50m", "memory": "32Mi"}, {"memory": "32Mi"}),
        ({"limits": {"cpu": "10m"}}, {"cpu": "10m", "memory": "64Mi"}, {"memory": "512Mi", "cpu": "10m"}),
    ],
)
def test_values_of_the_user_replace_defaults(given: dict[str, Any], requests: dict[str, str], limits: dict[str, str]) -> None:
    assert own_resources("gate", Resources.model_validate(given)) == {"requests": requests, "limits": limits}


def test_the_limit_of_smg_is_above_the_memory_of_all_requests_that_reach_it() -> None:
    """The front sends short requests to smg, and the batch server those within its budget. smg needs 3.5 times their size."""
    limit = parse_quantity(own_resources("smg", None)["limits"]["memory"])
    short = re.search(r"acl long req.hdr_val\(content-length\) gt (\d+)", front_config(FRONT))
    number = re.search(r"be_conn\(smg\),add\(txn.batches\) ge (\d+)", front_config(FRONT))
    assert limit is not None
    assert short is not None
    assert number is not None
    assert 3.5 * (int(short[1]) * int(number[1]) + Budget(DEFAULT_LIMIT_BYTES).bodies) < 0.6 * float(limit)


def test_each_field_reaches_its_container() -> None:
    fields = {"gate": "gateResources", "agent": "agentResources", "coordinator": "coordinatorResources", "batches": "batchesResources"}
    fields |= {"front": "frontResources", "smg": "resources"}
    resource = cr()
    for number, (name, field) in enumerate(fields.items()):
        owner = resource["spec"].setdefault("engine" if name in {"gate", "agent"} else "router", {})
        owner[field] = {"limits": {"memory": f"{number + 5}Gi"}}
    limits = {container["name"]: container["resources"]["limits"]["memory"] for container in containers(resource)}
    assert limits == {name: f"{number + 5}Gi" for number, name in enumerate(fields)}


def test_a_quota_of_every_kind_can_be_met_by_fields() -> None:
    """A quota refuses pods of which one container has no value for the kind."""
    every = {"cpu": "1", "memory": "9Gi", "ephemeral-storage": "1Gi"}
    given = {"requests": every, "limits": every}
    spec = {
        "model": {
            "path": "/models/m",
            "volume": {"claim": "models", "mountPath": "/models"},
            "download": {"image": "d:1", "command": ["fetch"], "resources": given},
        },
        "engine": {"image": "e:1", "gpuResource": "", "resources": given, "gateResources": given, "agentResources": given},
        "router": dict.fromkeys(("resources", "frontResources", "coordinatorResources", "batchesResources"), given),
        "weights": {
            "transport": "Staged",
            "staging": {"sizeLimit": "1Gi", "copies": 2},
            "store": {"resources": given, "snapshots": {"volume": {"claim": "c"}}},
        },
    }
    rollout = SGLangRollout.model_validate({**cr(), "spec": {"replicas": 1, **spec}})
    pods = [made["spec"]["template"]["spec"] for made in render_all(rollout, SETTINGS, "t") if "template" in made.get("spec", {})]
    every_container = [container for pod in pods for container in [*pod.get("initContainers", ()), *pod["containers"]]]
    assert {"package", "store", "download", "gate", "agent", "engine", "smg", "front"} <= {one["name"] for one in every_container}
    lacking = {
        f"{one['name']}: {part}.{kind}" for one in every_container for part in given for kind in every if kind not in one["resources"][part]
    }
    assert lacking == set()
