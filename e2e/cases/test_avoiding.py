"""An engine that fails repeatedly on one node moves to another node. Needs a cluster of at least two nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from e2e import stand_in
from e2e.cases.conftest import NAME, ready, remove, remove_stand
from e2e.kube import Kubectl, eventually

AVOIDING = "avoiding"
VICTIM, OTHER = f"{AVOIDING}-engine-1-0", f"{AVOIDING}-engine-0-0"


pytestmark = pytest.mark.two_nodes


@pytest.fixture
def avoiding(kubectl: Kubectl, operator: Kubectl) -> Iterator[str]:
    """Create a rollout of two stand-in engines on two nodes, and return its name."""
    found = kubectl.list("nodes")
    if len(found) < 2:
        pytest.skip(f"this case needs two nodes and the cluster has {len(found)}: `e2e/cluster/lab up --nodes 2`")
    remove_stand(kubectl)
    for name in (NAME, AVOIDING):
        remove(kubectl, name)
    kubectl.apply(stand_in.code())
    document = stand_in.rollout(AVOIDING, replicas=2)
    policy = {"failures": 2, "withinSeconds": 1800, "forSeconds": 1800}
    document["spec"]["scheduling"] = {"spreadEngines": "Required", "avoidNodes": policy}
    kubectl.apply(document)
    eventually("the rollout is Ready", lambda: ready(kubectl, AVOIDING), within=180, every=1)
    yield AVOIDING
    remove(kubectl, AVOIDING)


def started(pod: dict[str, Any]) -> bool:
    return any(status["name"] == "engine" and status.get("started") for status in pod["status"].get("containerStatuses", []))


def kill(kubectl: Kubectl) -> None:
    """End the engine as its agent does. The kubelet restarts the container."""
    kubectl.exec(VICTIM, "touch", "/run/rollout/kill", container="engine")


def events(kubectl: Kubectl, reason: str) -> list[str]:
    found = kubectl.list("events")
    return [event["message"] for event in found if event["reason"] == reason and event["involvedObject"].get("name") == AVOIDING]


def avoided(kubectl: Kubectl) -> list[str]:
    return [row["node"] for row in kubectl.get("sglr", AVOIDING)["status"].get("avoidedNodes", [])]


def test_engine_that_fails_repeatedly_moves_to_another_node(kubectl: Kubectl, avoiding: str) -> None:
    before, other = kubectl.get("pod", VICTIM), kubectl.get("pod", OTHER)
    bad = before["spec"]["nodeName"]
    assert bad != other["spec"]["nodeName"]

    def moved() -> str:
        pod = kubectl.get("pod", VICTIM)
        if pod["metadata"]["uid"] != before["metadata"]["uid"]:
            return str(pod["spec"].get("nodeName", ""))
        if started(pod):
            kill(kubectl)
        return ""

    # Failures within one minute count once, and the kubelet's back-off grows, so this takes two minutes.
    assert eventually("the engine runs on another node", moved, within=300, every=1) != bad
    eventually("the rollout is Ready", lambda: ready(kubectl, AVOIDING), within=180, every=1)
    assert avoided(kubectl) == [bad]
    assert any(message.startswith(f"Node {bad} is avoided until ") for message in events(kubectl, "NodeAvoided"))

    uids = [kubectl.get("pod", name)["metadata"]["uid"] for name in (VICTIM, OTHER)]
    assert uids[1] == other["metadata"]["uid"], "the healthy engine keeps its pod"
    kubectl("patch", "sglr", AVOIDING, "--type=merge", "-p", json.dumps({"spec": {"scheduling": {"avoidNodes": None}}}))
    eventually("no node is avoided", lambda: avoided(kubectl) == [])
    eventually("an Event reports it", lambda: bool(events(kubectl, "NodeAllowedAgain")))

    def template() -> dict[str, Any]:
        return dict(kubectl.get("statefulset", f"{AVOIDING}-engine-1")["spec"]["template"]["spec"])

    eventually("the affinity is gone", lambda: "affinity" not in template())
    assert [kubectl.get("pod", name)["metadata"]["uid"] for name in (VICTIM, OTHER)] == uids
