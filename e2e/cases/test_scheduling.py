"""Engines in a queue of Kueue: as many complete engines start as the quota allows, and status reports that the others wait."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e import stand_in
from e2e.cases.conftest import ready, remove
from e2e.cases.ranks import two_ranks
from e2e.kube import Kubectl, condition, eventually
from e2e.neighbours import kueue

pytestmark = pytest.mark.neighbours
QUEUED = "queued"
# An engine's pod requests 200m in total: 50m for the stand-in, 150m for gate and agent. One fits, two do not.
ONE_ENGINE, TWO_ENGINES = "300m", "450m"
# A pod of real SGLang requests 350m. Three fit: one engine of two pods, and half of another.
ONE_AND_A_HALF, TWO_WIDE = "1100m", "1400m"


def quota(kubectl: Kubectl, cpu: str) -> None:
    """Create or change the queue, so that it has this much CPU."""
    resources = [{"name": "cpu", "nominalQuota": cpu}, {"name": "memory", "nominalQuota": "8Gi"}]
    group = {"coveredResources": ["cpu", "memory"], "flavors": [{"name": "any", "resources": resources}]}
    specs: list[tuple[str, str, dict[str, Any]]] = [
        ("ResourceFlavor", "any", {}),
        ("ClusterQueue", "team", {"namespaceSelector": {}, "resourceGroups": [group]}),
        ("LocalQueue", "rollouts", {"clusterQueue": "team"}),
    ]
    for kind, name, spec in specs:
        made = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": {"name": name}, "spec": spec}
        # Kueue's webhooks answer a moment after its process has started.
        eventually(f"{kind} {name} is applied", functools.partial(kubectl.apply, made))


@pytest.fixture
def queue(kubectl: Kubectl, operator: Kubectl, tmp_path: Path) -> Iterator[None]:
    """Run Kueue. Each case sets the quota that it needs."""
    remove(kubectl, QUEUED)
    with kueue.running(kubectl, tmp_path):
        yield
        # While Kueue runs, because Kueue removes its finalizers from the pods.
        remove(kubectl, QUEUED)


def status(kubectl: Kubectl) -> dict[str, Any]:
    return dict(kubectl.get("sglr", QUEUED))


def ready_message(kubectl: Kubectl) -> str:
    return condition(status(kubectl), "Ready")["message"]


def patch(kubectl: Kubectl, **spec: Any) -> None:
    kubectl("patch", "sglr", QUEUED, "--type=merge", "-p", json.dumps({"spec": spec}))


def engine_pods(kubectl: Kubectl) -> dict[str, dict[str, Any]]:
    found = kubectl.list("pods", f"rollout.sglang.io/rollout={QUEUED},app.kubernetes.io/component=engine")
    return {pod["metadata"]["name"]: pod for pod in found}


def gated(pod: dict[str, Any]) -> bool:
    """Return whether Kueue keeps the pod from the scheduler."""
    return "kueue.x-k8s.io/admission" in {gate["name"] for gate in pod["spec"].get("schedulingGates", [])}


def test_as_many_engines_start_as_the_quota_allows(kubectl: Kubectl, queue: None) -> None:
    quota(kubectl, ONE_ENGINE)
    kubectl.apply(stand_in.code())
    document = stand_in.rollout(QUEUED, replicas=2)
    document["spec"]["scheduling"] = {"queueName": "rollouts"}
    kubectl.apply(document)

    eventually("one engine serves", lambda: status(kubectl)["status"]["readyReplicas"] == 1, within=180, every=1)
    eventually("the other engine waits", lambda: condition(status(kubectl), "Ready")["reason"] == "WaitingForQueue")
    assert "it waits in queue rollouts until there is quota for all of its pods" in ready_message(kubectl)
    assert condition(status(kubectl), "Degraded")["status"] == "False"
    waiting = [pod for pod in engine_pods(kubectl).values() if "nodeName" not in pod["spec"]]
    assert len(waiting) == 1
    assert gated(waiting[0])

    quota(kubectl, TWO_ENGINES)
    eventually("both serve", lambda: ready(kubectl, QUEUED), within=180, every=1)

    # A rolling update passes through the queue pod by pod.
    before = {pod["metadata"]["uid"] for pod in engine_pods(kubectl).values()}
    patch(kubectl, engine={"logLevel": "Warning"})

    def rolled() -> bool:
        now = {pod["metadata"]["uid"] for pod in engine_pods(kubectl).values()}
        return ready(kubectl, QUEUED) and not now & before

    eventually("both engines are recreated and serve", rolled, within=240, every=1)

    # Kueue refuses to change requests that it has counted. It counts a suspended fleet again.
    patch(kubectl, engine={"resources": {"requests": {"cpu": "60m"}}})
    eventually("status reports Kueue's refusal", lambda: condition(status(kubectl), "Ready")["reason"] == "ApplyFailed")
    assert "field is immutable" in ready_message(kubectl)
    patch(kubectl, state="Suspended")
    eventually("no engine is left", lambda: not engine_pods(kubectl), every=1)
    patch(kubectl, state="Active")
    eventually("both engines serve with the new request", lambda: ready(kubectl, QUEUED), within=240, every=1)
    requests = [pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] for pod in engine_pods(kubectl).values()]
    assert requests == ["60m", "60m"]


def test_engine_of_two_pods_does_not_start_with_quota_for_one_pod(kubectl: Kubectl, queue: None) -> None:
    quota(kubectl, ONE_AND_A_HALF)
    document = two_ranks(QUEUED, nodes=2)
    document["spec"] |= {"replicas": 2, "scheduling": {"queueName": "rollouts"}}
    kubectl.apply(document)

    eventually("one engine serves", lambda: status(kubectl)["status"]["readyReplicas"] == 1, within=400, every=2)
    pods = engine_pods(kubectl)
    assert len(pods) == 4
    waiting = {name for name, pod in pods.items() if "nodeName" not in pod["spec"]}
    serving = next(row["name"] for row in status(kubectl)["status"]["engines"] if row["phase"] == "Serving")
    assert waiting == {name for name in pods if not name.startswith(serving)}, "both pods of the waiting engine"
    assert all(gated(pods[name]) for name in waiting)
    assert condition(status(kubectl), "Ready")["reason"] == "WaitingForQueue"
    assert condition(status(kubectl), "Degraded")["status"] == "False"

    quota(kubectl, TWO_WIDE)
    eventually("both serve", lambda: ready(kubectl, QUEUED), within=400, every=2)
