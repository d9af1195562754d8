"""A trainer or the coordinator dies or stops during an update of real SGLang engines: the fleet keeps serving and reports the reason."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator

import pytest

from e2e.cases.actions import PUSH, Client, document, generate, push, serving
from e2e.cases.conftest import trainer_pod
from e2e.cases.test_faults import restarts, router_pod
from e2e.kube import Kubectl, eventually

WEIGHTS = {"deadlines": {"groupSeconds": 20, "idleSeconds": 15, "updateSeconds": 20}, "trainerLease": {"ttlSeconds": 5}}


@contextlib.contextmanager
def trainer(kubectl: Kubectl, rollout: str, pod: str, version: str, manner: str) -> Iterator[int]:
    """Run a trainer in a pod until the point that ``manner`` names, and return its process ID there."""
    command = ["kubectl", "-n", kubectl.namespace, "exec", "-i", pod, "-c", "trainer", "--"]
    command += ["python", "-", f"http://{rollout}-router:30000", version, "1", manner]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(PUSH)
        child.stdin.close()
        yield int(json.loads(child.stdout.readline())["pid"])
    finally:
        child.kill()
        child.wait(10)


@pytest.fixture
def short_lease(kubectl: Kubectl, fleet: str, both_serve: None) -> Iterator[str]:
    """Give the fleet a short lease, and return its name."""
    before = kubectl.get("sglr", fleet)["spec"]["weights"]
    kubectl("patch", "sglr", fleet, "--type=merge", "-p", json.dumps({"spec": {"weights": WEIGHTS}}))
    generation = kubectl.get("sglr", fleet)["metadata"]["generation"]

    def known() -> bool:
        record = json.loads(kubectl.get("configmap", f"{fleet}-weights")["data"]["weights.json"])
        return bool(record["intent_generation"] >= generation)

    eventually("the coordinator knows the short lease", known)
    yield fleet
    kubectl("patch", "sglr", fleet, "--type=merge", "-p", json.dumps({"spec": {"weights": before}}))


def test_update_is_aborted_when_the_trainers_pod_is_killed_in_the_transfer(kubectl: Kubectl, short_lease: str, url: str) -> None:
    before = document(url)["committed"]
    pod = trainer_pod(kubectl, "doomed")
    with trainer(kubectl, short_lease, pod, "501", "stall"):
        eventually("the engines wait for tensors", lambda: document(url)["phase"] == "transfer")
        kubectl("delete", "pod", pod, "--grace-period=0", "--force")
    eventually("the update is aborted", lambda: document(url)["phase"] == "idle")
    assert document(url)["committed"] == before
    eventually("an Event names the reason", lambda: "did not take the tensors" in failed_update(kubectl, short_lease))
    version = str(int(time.time()))
    after = push(kubectl, short_lease, version, seed=7)
    assert {answer["version"] for answer in after["engines"].values()} == {version}
    serving(url, 2)


def test_fleet_resumes_when_its_trainer_hangs_during_a_pause(kubectl: Kubectl, short_lease: str, url: str, client: str) -> None:
    before = document(url)["committed"]
    with trainer(kubectl, short_lease, client, "502", "pause") as pid:
        kubectl.exec(client, "sh", "-c", f"kill -STOP {pid}", container="trainer")
        try:
            eventually("the fleet generates again", lambda: generate(url).status_code == 200)
            serving(url, 2)
            assert document(url)["committed"] == before
            assert document(url)["phase"] == "idle"
        finally:
            kubectl.exec(client, "sh", "-c", f"kill -KILL {pid}", container="trainer")


def test_fleet_keeps_its_version_when_the_coordinator_is_killed_in_the_transfer(
    kubectl: Kubectl, short_lease: str, url: str, client: str
) -> None:
    before = document(url)["committed"]
    expected = tuple(generate(url).json()["output_ids"])
    router = router_pod(kubectl, short_lease)
    count = restarts(kubectl, router, "coordinator")
    with Client(url) as user:
        eventually("the client gets answers", lambda: len(user.versions) >= 2, every=0.1)
        with trainer(kubectl, short_lease, client, "503", "stall") as pid:
            eventually("the engines wait for tensors", lambda: document(url)["phase"] == "transfer", every=0.1)
            # Kill the children of process 1: no signal from inside the container kills process 1 itself.
            kubectl.exec(router, "sh", "-c", "kill -KILL $(cat /proc/1/task/1/children)", container="coordinator")
            eventually("the kubelet restarts the coordinator", lambda: restarts(kubectl, router, "coordinator") > count)
            # The trainer may have ended already, because its call failed.
            kubectl.exec(client, "sh", "-c", f"kill -KILL {pid} 2> /dev/null || :", container="trainer")
        eventually("the fleet is at rest", lambda: at_rest(url), every=1)
        seen = document(url)
        asked = len(user.statuses)
        eventually("the client has sent more requests", lambda: len(user.statuses) >= asked + 4)
    assert seen["committed"] == before
    for row in seen["members"]:
        assert row["gate_open"] is (row["version"] == before), row
    assert set(user.versions) == {before["label"]}
    assert user.answers == {(before["label"], expected)}, "no token comes from uncommitted weights"

    after = push(kubectl, short_lease, "504", seed=504)
    assert {answer["version"] for answer in after["engines"].values()} == {"504"}
    assert serving(url, 2)["committed"]["label"] == "504"


def at_rest(url: str) -> bool:
    """Return whether no update or pause is left, and every engine can take part in the next update."""
    seen = document(url)
    return seen["phase"] == "idle" and all(row["rank_offset"] is not None for row in seen["members"])


def failed_update(kubectl: Kubectl, fleet: str) -> str:
    """Return the message of the Event about the last update that failed."""
    found = [event for event in kubectl.list("events") if event["involvedObject"].get("name") == fleet]
    return str([event["message"] for event in found if event["reason"] == "WeightUpdateFailed"][-1:])
