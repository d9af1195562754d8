"""Two coordinators, of which the older one hangs or cannot see that it lost the Lease: only the holder of the Lease changes the fleet."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from e2e.cases.actions import document
from e2e.cases.stand_in_rollout import StandInRollout, let_all_serve
from e2e.chaos.tokens import FEW
from e2e.chaos.trainer_process import Trainer
from e2e.chaos.watch import Watch
from e2e.cluster import nodes
from e2e.kube import Kubectl, Refused, eventually

COMPONENT = "app.kubernetes.io/component=router"
API_SERVER_PORT = 6443


def coordinator_pid(pod: str) -> int:
    """Return the process ID of a pod's coordinator on this machine, which runs the lab. Raises LookupError."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if b"coordinator" not in words or words[0] == b"tini":
                continue
            if f"HOSTNAME={pod}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                return int(entry.name)
    raise LookupError(f"no coordinator of {pod} runs on this machine")


@pytest.fixture(scope="module")
def two_routers(kubectl: Kubectl, operator: Kubectl, stand_fleet: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run two router pods. The operator does not run meanwhile, because it would remove one."""
    with kubectl.forward(f"svc/{stand_fleet}-router", 30000) as url:
        stand = StandInRollout(kubectl, stand_fleet, url, 3, tmp_path_factory.mktemp("routers"))
        let_all_serve(stand)  # now, because the Service still leads to one router: the second one answers no trainer
    scale = ("scale", "deployment", f"{stand.name}-router")
    operator("scale", "deployment", "sglang-rollout-operator", "--replicas=0")
    eventually("the operator has ended", lambda: not operator.list("pods", "app.kubernetes.io/name=sglang-rollout-operator"))
    stand.kubectl(*scale, "--replicas=2")
    try:
        eventually("both routers run", lambda: len(running(stand)) == 2)
        yield
    finally:
        stand.kubectl(*scale, "--replicas=1")
        operator("scale", "deployment", "sglang-rollout-operator", "--replicas=1")
        operator("rollout", "status", "deployment/sglang-rollout-operator", "--timeout=90s", timeout=100)
        eventually("one router is left", lambda: len(running(stand)) == 1, within=240)
        eventually("its coordinator leads", lambda: lease(stand)["holderIdentity"] == next(iter(running(stand))))


def leader_and_other(stand: StandInRollout) -> tuple[str, str]:
    """Return the names of the router pod whose coordinator leads and of the other one."""
    leader = str(lease(stand)["holderIdentity"])
    return leader, next(name for name in running(stand) if name != leader)


def running(stand: StandInRollout) -> dict[str, str]:
    """Return the addresses of the router pods that run and are not being deleted, by name."""
    pods = stand.kubectl.list("pods", f"rollout.sglang.io/rollout={stand.name},{COMPONENT}")
    return {
        pod["metadata"]["name"]: pod["status"]["podIP"]
        for pod in pods
        if not pod["metadata"].get("deletionTimestamp") and pod["status"]["phase"] == "Running"
    }


def lease(stand: StandInRollout) -> dict[str, Any]:
    """Return ``spec`` of the coordinators' Lease."""
    return dict(stand.kubectl.get("lease", f"{stand.name}-router")["spec"])


@contextlib.contextmanager
def no_api_server(stand: StandInRollout, pod: str) -> Iterator[None]:
    """Drop all traffic from a pod to the API server, on the pod's node. Other traffic of the pod passes."""
    found = stand.kubectl.get("pod", pod)
    node = int(found["spec"]["nodeName"].removeprefix("node"))
    rule = ["-s", found["status"]["podIP"], "-p", "tcp", "--dport", str(API_SERVER_PORT), "-j", "DROP"]

    def all_chains(action: str) -> None:
        for chain in ("INPUT", "FORWARD"):  # the API server may run on the same node or on another node
            subprocess.run(nodes.enter(node, "iptables", action, chain, *rule), check=True, capture_output=True, timeout=10)

    all_chains("-I")
    try:
        yield
    finally:
        all_chains("-D")


def record(stand: StandInRollout) -> dict[str, Any]:
    """Return the coordinators' record of the fleet."""
    return dict(json.loads(stand.kubectl.get("configmap", f"{stand.name}-weights")["data"]["weights.json"]))


def coordinator_log(stand: StandInRollout, pod: str) -> str:
    """Return the log of a coordinator, including the log before its last restart."""
    lines = ""
    for previous in (["--previous"], []):
        with contextlib.suppress(Refused):  # the container was never restarted
            lines += stand.kubectl("logs", pod, "-c", "coordinator", *previous)
    return lines


@pytest.mark.skipif(
    os.environ.get("CLUSTER", "lab") != "lab", reason="a coordinator is stopped from outside of its container: only the lab's can be"
)
def test_coordinator_that_hung_in_an_update_commits_nothing(two_routers: None, stand: StandInRollout) -> None:
    old, new = leader_and_other(stand)
    trainer = stand.trainer(url=f"http://{running(stand)[old]}:30000")
    before = stand.push(trainer)
    term = lease(stand)["leaseTransitions"]
    delay_verification(stand)
    with stand.kubectl.forward(f"pod/{old}", 30000) as old_url, stand.kubectl.forward(f"pod/{new}", 30000) as new_url:
        trainer.begin(stand.label())
        eventually("the update is verified", lambda: document(old_url)["phase"] == "verify", every=0.1)
        pid = coordinator_pid(old)
        os.kill(pid, signal.SIGSTOP)
        try:
            eventually("the other coordinator holds the Lease", lambda: lease(stand)["holderIdentity"] == new)
            assert lease(stand)["leaseTransitions"] > term
            eventually("the new leader knows the committed version", lambda: document(new_url)["committed"]["label"] == before)
        finally:
            os.kill(pid, signal.SIGCONT)
        answer = trainer.outcome(180)
        assert not answer["ok"], "the old coordinator reported a commit"
        assert document(new_url)["committed"]["label"] == before
        following = stand.trainer(url=f"http://{running(stand)[new]}:30000")
        eventually("all engines are up", lambda: all(row["state"] != "unknown" for row in document(new_url)["members"]))
        label = stand.push(following)
        assert document(new_url)["committed"]["label"] == label
        eventually("the new leader keeps the Lease", lambda: lease(stand)["holderIdentity"] == new)
        eventually("all engines serve", lambda: document(new_url)["serving"] == stand.engines)


@pytest.mark.skipif(
    os.environ.get("CLUSTER", "lab") != "lab", reason="a pod is cut off from the API server on its node: only the lab's can be"
)
def test_only_the_newer_of_two_leaders_changes_the_fleet(two_routers: None, stand: StandInRollout) -> None:
    old, new = leader_and_other(stand)
    first = stand.trainer(url=f"http://{running(stand)[old]}:30000")
    with (
        stand.kubectl.forward(f"pod/{old}", 30000) as old_url,
        stand.kubectl.forward(f"pod/{new}", 30000) as new_url,
        ThreadPoolExecutor(1) as pool,
    ):
        expected = {"base": first.base}
        watches = [Watch(url, expected) for url in (old_url, new_url)]
        before = stand.push(first, watches[0])
        start_clients(watches, before)
        term = record(stand)["term"]
        connecting = pool.submit(stand.trainer, url=f"http://{running(stand)[new]}:30000")  # is answered when the new one leads
        delay_verification(stand)
        lost = begin_push(stand, first, watches)
        eventually("the old leader verifies its update", lambda: document(old_url)["phase"] == "verify", every=0.1)
        with no_api_server(stand, old):
            release_lease(stand)
            eventually("the new leader knows the committed version", lambda: document(new_url)["committed"]["label"] == before)
            second = connecting.result(60)
            label = begin_push(stand, second, watches)
            assert not end_push(first, lost, watches)["ok"], "the old coordinator reported a commit"
            if not end_push(second, label, watches)["ok"]:  # it began in the middle of the old leader's update
                push_until_committed(stand, second, watches)
            why = f"this one is of term {term}"
            eventually("the old coordinator says why it ended", lambda: why in coordinator_log(stand, old))
            refused = begin_push(stand, first, watches)
            assert not end_push(first, refused, watches)["ok"], "the old coordinator accepted an update without leading"
        eventually("the old coordinator waits", lambda: f"{new} leads: waiting" in coordinator_log(stand, old))
        # An engine of the old leader's update may have been restarted, and then waits for the next push.
        eventually("all engines are up", lambda: all(row["rank_offset"] is not None for row in document(new_url)["members"]))
        label = push_until_committed(stand, second, watches)
        eventually("all engines serve", lambda: document(new_url)["serving"] == stand.engines)
        assert (record(stand)["term"], record(stand)["committed"]["label"]) == (document(new_url)["term"], label)
        assert record(stand)["term"] > term
        assert [stand.state(index)["weight_version"] for index in range(stand.engines)] == [label] * stand.engines
        stop_clients(watches)


def delay_verification(stand: StandInRollout) -> None:
    """Let each engine take 6 s for its next checksum, so that the phase ``verify`` can be seen."""
    for index in range(stand.engines):
        stand.fault(index, "slow", "check", seconds=6.0)


def release_lease(stand: StandInRollout) -> None:
    """Remove the holder of the Lease, as if the leader had not renewed it for long enough."""
    free = {"spec": {"holderIdentity": ""}}
    stand.kubectl("patch", "lease", f"{stand.name}-router", "--type=merge", "-p", json.dumps(free))


def start_clients(watches: list[Watch], committed: str) -> None:
    """Start the clients of each router."""
    for watch in watches:
        watch.committed(committed)
        watch.start(FEW, FEW)


def stop_clients(watches: list[Watch]) -> None:
    """Wait until the clients of each router got an answer, stop them, and check that no answer was wrong."""
    answers = [watch.answers for watch in watches]
    eventually(
        "clients of both routers get answers",
        lambda: all(watch.answers > count for watch, count in zip(watches, answers, strict=True)),
    )
    for watch in watches:
        watch.stop()
    assert [watch.violations for watch in watches] == [[], []]


def begin_push(stand: StandInRollout, trainer: Trainer, watches: list[Watch]) -> str:
    """Start a push and return its label."""
    label = stand.label()
    watches[0].expected[label] = trainer.begin(label)
    return label


def end_push(trainer: Trainer, label: str, watches: list[Watch]) -> dict[str, Any]:
    """Wait for the outcome of a push, record it for the clients, and return it."""
    answer = trainer.outcome(180)
    for watch in watches:
        (watch.committed if answer["ok"] else watch.failed)(label)
    return answer


def push_until_committed(stand: StandInRollout, trainer: Trainer, watches: list[Watch]) -> str:
    """Push until a version is committed, and return its label. The first pushes may abort the other coordinator's update."""
    deadline = time.monotonic() + 60
    while True:
        label = begin_push(stand, trainer, watches)
        answer = end_push(trainer, label, watches)
        if answer["ok"]:
            return label
        assert time.monotonic() < deadline, answer
