"""A cluster with a taint on every node: each pod of a fleet starts with its own toleration, and status names the one that lacks it."""

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
"""No such Secret exists: the kubelet pulls nothing here, and starts the pods all the same."""


@pytest.fixture
def tainted(kubectl: Kubectl, operator: Kubectl) -> Iterator[str]:
    """A rollout of one engine on tainted nodes; its name. Engine and prefetch tolerate the taint, the router does not."""
    if os.environ.get("CLUSTER", "lab") != "lab":
        pytest.skip("only on the lab may every node be tainted")
    remove(kubectl, TAINTED)
    kubectl.apply(stand_in.code())
    document = stand_in.rollout(TAINTED, replicas=1)
    spec = document["spec"]
    spec["model"] = {
        "path": "/models/tiny",
        "servedName": "tiny",
        "prefetch": True,
        "volume": {"hostPath": f"{stand_in.SHARED}/tainted"},
        "download": {"command": ["sh", "-c", "mkdir -p $(MODEL_PATH)"]},
    }
    spec["scheduling"] = {"tolerations": TOLERATIONS}
    spec["podTemplate"]["spec"]["imagePullSecrets"] = SECRETS
    # The kubelet makes the folder for root alone, and this image has another user.
    spec["podTemplate"]["spec"]["initContainers"].append({"name": "download", "securityContext": {"runAsUser": 0}})
    try:
        kubectl("taint", "nodes", "--all", f"{KEY}=rl:NoSchedule", "--overwrite")
        kubectl.apply(document)
        yield TAINTED
    finally:
        kubectl("taint", "nodes", "--all", f"{KEY}-")
        remove(kubectl, TAINTED)


def test_a_fleet_starts_on_tainted_nodes_when_its_router_tolerates_the_taint_too(kubectl: Kubectl, tainted: str) -> None:
    def router() -> dict[str, str]:
        return condition(kubectl.get("sglr", tainted), "Ready")

    eventually("status quotes the scheduler", lambda: "no node can take it: " in router()["message"], within=120)
    assert router()["reason"] == "RouterNotReady"
    assert router()["message"].startswith(f"Router pod {tainted}-router-")
    assert "untolerated taint" in router()["message"]

    tolerant = {"scheduling": {"tolerations": TOLERATIONS}, "podTemplate": {"spec": {"imagePullSecrets": SECRETS}}}
    kubectl("patch", "sglr", tainted, "--type=merge", "-p", json.dumps({"spec": {"router": tolerant}}))
    eventually("the fleet is Ready", lambda: ready(kubectl, tainted), within=240, every=1)
    prefetch = kubectl.get("sglr", tainted)["status"]["prefetch"]
    assert prefetch["ready"] == prefetch["wanted"] == len(kubectl.list("nodes"))
    found = kubectl.list("pods", f"rollout.sglang.io/rollout={tainted}")
    assert {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in found} == {"engine", "router", "prefetch"}
    assert all(pod["spec"]["imagePullSecrets"] == SECRETS for pod in found)
    with kubectl.forward(f"svc/{tainted}-router", 30000) as url:
        assert generate(url).status_code == 200
