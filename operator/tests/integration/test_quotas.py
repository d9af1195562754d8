"""A namespace with a ResourceQuota and a LimitRange of every kind admits each pod of a rollout whose spec sets its fields for resources."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml
from e2e.cluster.controlplane import ControlPlane
from e2e.cluster.fixtures import kubernetes_api  # noqa: F401 - a fixture
from e2e.cluster.say import wait_until

from tests.integration.test_chart import CHART, helm
from tests.integration.test_pod_security import pods

pytestmark = pytest.mark.controlplane

GIVEN = {"cpu": "1", "memory": "9Gi", "ephemeral-storage": "1Gi"}
EVERY = {"requests": GIVEN, "limits": GIVEN}
HARD = {f"{part}.{kind}": "100Ti" if kind != "cpu" else "1000" for part in EVERY for kind in GIVEN} | {"pods": "100"}
RANGE = {
    "type": "Container",
    "min": {"cpu": "1", "memory": "9Gi", "ephemeral-storage": "1Gi"},
    "max": {"cpu": "1", "memory": "64Gi", "ephemeral-storage": "1Gi"},
    "maxLimitRequestRatio": {"cpu": "1", "memory": "1"},
}
NAMESPACES: dict[str, dict[str, Any]] = {
    "every-quota": {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "every"}, "spec": {"hard": HARD}},
    "every-range": {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "every"}, "spec": {"limits": [RANGE]}},
}
ROUTER = dict.fromkeys(("resources", "frontResources", "coordinatorResources", "batchesResources"), EVERY)
ENGINE = {"image": "e:1", "gpuResource": "", "resources": EVERY, "gateResources": EVERY, "agentResources": EVERY}
STORE = {"resources": EVERY, "snapshots": {"volume": {"claim": "snapshots"}}}
DOWNLOAD = {"image": "d:1", "command": ["fetch"], "resources": EVERY}
VOLUME = {"claim": "models", "mountPath": "/models"}
FLEETS: dict[str, dict[str, Any]] = {
    "hub": {"model": {"path": "Qwen/Qwen3-0.6B"}, "engine": ENGINE, "router": ROUTER},
    "wide": {"model": {"path": "m"}, "engine": {**ENGINE, "parallelism": {"tensor": 2}, "nodes": 2}, "router": ROUTER},
    "staged": {
        "model": {"path": "/models/m", "volume": VOLUME, "download": DOWNLOAD},
        "engine": ENGINE,
        "router": ROUTER,
        "weights": {"transport": "Staged", "staging": {"sizeLimit": "1Gi", "copies": 2}, "store": STORE},
    },
}


def every_pod() -> Iterator[dict[str, Any]]:
    for name, spec in FLEETS.items():
        metadata = {"name": name, "namespace": "n", "uid": name, "generation": 1}
        cr = {"apiVersion": "rollout.sglang.io/v1alpha1", "kind": "SGLangRollout", "metadata": metadata, "spec": spec}
        yield from (pod for _, pod in pods(name, cr))


def operator_pod(api: ControlPlane) -> dict[str, Any]:
    """Return the pod of the chart's Deployment."""
    done = helm(api, "template", "o", str(CHART), "--kube-version=1.34.3", "--set-json", f"resources={json.dumps(EVERY)}")
    made = next(one for one in yaml.safe_load_all(done.stdout) if one and one["kind"] == "Deployment")
    spec = {key: value for key, value in made["spec"]["template"]["spec"].items() if key != "serviceAccountName"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "operator"}, "spec": spec}


@pytest.fixture(scope="module")
def api(kubernetes_api: ControlPlane) -> ControlPlane:  # noqa: F811
    """Return the API server with one namespace for the quota, and one for the range, whose defaults would hide a missing value."""
    for namespace, made in NAMESPACES.items():
        kubernetes_api.kubectl("create", "namespace", namespace)
        kubernetes_api.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(made))
        account = partial(kubernetes_api.kubectl, "get", "serviceaccount", "default", "-n", namespace, check=False)
        wait_until(partial(_succeeds, account), seconds=60, what=f"namespace {namespace} has no ServiceAccount", every=0.2)
    counted = partial(kubernetes_api.get, "resourcequota", "every", "-n", "every-quota")
    wait_until(lambda: bool(counted().get("status", {}).get("hard")), seconds=60, what="the quota is not in force", every=0.2)
    return kubernetes_api


def _succeeds(command: Callable[[], CompletedProcess[str]]) -> bool:
    return command().returncode == 0


def create(api: ControlPlane, namespace: str, *pods: dict[str, Any]) -> tuple[int, str]:
    """Return how many of the pods the namespace admits, and the refusals."""
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": pods})
    done = api.kubectl("create", "--dry-run=server", "-n", namespace, "-f", "-", stdin=text, check=False)
    return len(done.stdout.splitlines()), done.stderr


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_pod_is_admitted(api: ControlPlane, namespace: str) -> None:
    made = [*every_pod(), operator_pod(api)]
    assert {pod["metadata"]["name"] for pod in made} >= {"hub-engine", "hub-router", "staged-store", "wide-engine", "operator"}
    assert create(api, namespace, *made) == (len(made), "")


@pytest.mark.parametrize("kind", [f"{part}.{kind}" for part in EVERY for kind in ("cpu", "memory")])
def test_the_quota_refuses_a_pod_of_which_one_container_lacks_a_value(api: ControlPlane, kind: str) -> None:
    """Kubernetes demands no ``ephemeral-storage`` of a container, and only counts it."""
    part, _, name = kind.partition(".")
    made = next(every_pod())
    lacking = made["spec"]["containers"][0]["resources"] = {which: dict(values) for which, values in EVERY.items()}
    del lacking[part][name]
    if part == "requests":
        del lacking["limits"][name]  # which the API server would take as the request
    admitted, refused = create(api, "every-quota", made)
    assert admitted == 0
    assert f"must specify {kind}" in refused or f"{kind} for" in refused
