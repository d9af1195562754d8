"""A cluster with a taint on every node: pods start if they have a toleration, and status names the pod that has none."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from e2e import stand_in
from e2e.cases.actions import generate
from e2e.cases.conftest import ready, remove
from e2e.kube import Kubectl, condition, eventually

TAINTED = "tainted"
KEY = "dedicated.example.org"
TOLERATIONS = [{"key": KEY, "operator": "Equal", "value": "rl", "effect": "NoSchedule"}]
SECRETS = [{"name": "registry"}]
"""This Secret does not exist. The kubelet pulls no image here, so it starts the pods without it."""


@pytest.fixture
def tainted(kubectl: Kubectl, operator: Kubectl) -> Iterator[str]:
    """Create a rollout whose engine tolerates the taint, but not its router, and return its name."""
    if os.environ.get("CLUSTER", "lab") != "lab":
        pytest.skip("only on the lab may every node be tainted")
    remove(kubectl, TAINTED)
    kubectl.apply(stand_in.code())
    document = stand_in.rollout(TAINTED, replicas=1)
    spec = document["spec"]
    spec["model"] = {
        "path": "/models/tiny",
        "servedName": "tiny",
        "volume": {"hostPath": f"{stand_in.SHARED}/tainted"},
        "download": {"command": ["sh", "-c", "mkdir -p $(MODEL_PATH)"]},
    }
    spec["scheduling"] = {"tolerations": TOLERATIONS}
    spec["podTemplate"]["spec"]["imagePullSecrets"] = SECRETS
    # Only root can write to the folder that the kubelet creates, and this image has another user.
    spec["podTemplate"]["spec"]["initContainers"].append({"name": "download", "securityContext": {"runAsUser": 0}})
    try:
        kubectl("taint", "nodes", "--all", f"{KEY}=rl:NoSchedule", "--overwrite")
        kubectl.apply(document)
        yield TAINTED
    finally:
        kubectl("taint", "nodes", "--all", f"{KEY}-")
        remove(kubectl, TAINTED)


def test_fleet_starts_on_tainted_nodes_when_its_router_tolerates_the_taint(kubectl: Kubectl, tainted: str) -> None:
    def ready_condition() -> dict[str, str]:
        return condition(kubectl.get("sglr", tainted), "Ready")

    eventually("status quotes the scheduler", lambda: "no node can take it: " in ready_condition()["message"])
    assert ready_condition()["reason"] == "RouterNotReady"
    assert ready_condition()["message"].startswith(f"Router pod {tainted}-router-")
    assert "untolerated taint" in ready_condition()["message"]

    tolerant = {"scheduling": {"tolerations": TOLERATIONS}, "podTemplate": {"spec": {"imagePullSecrets": SECRETS}}}
    kubectl("patch", "sglr", tainted, "--type=merge", "-p", json.dumps({"spec": {"router": tolerant}}))
    eventually("the rollout is Ready", lambda: ready(kubectl, tainted), within=240, every=1)
    found = kubectl.list("pods", f"rollout.sglang.io/rollout={tainted}")
    assert {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in found} == {"engine", "router"}
    assert all(pod["spec"]["imagePullSecrets"] == SECRETS for pod in found)
    with kubectl.forward(f"svc/{tainted}-router", 30000) as url:
        assert generate(url).status_code == 200
