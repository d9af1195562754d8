"""Two coordinators: only the holder of the Lease can change the fleet. The older one was stopped, or still believes that it leads."""

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
from e2e.cases.stand import Stand, whole
from e2e.chaos.talk import Trainer
from e2e.chaos.tokens import FEW
from e2e.chaos.watch import Watch
from e2e.cluster import nodes
from e2e.kube import Kubectl, Refused, eventually

COMPONENT = "app.kubernetes.io/component=router"
API_SERVER_PORT = 6443


def coordinator_pid(pod: str) -> int:
    """The coordinator's process on this machine, which holds the lab. Raises LookupError."""
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
    """Two router pods by hand; the operator is away, because it would undo it."""
    with kubectl.forward(f"svc/{stand_fleet}-router", 30000) as url:
        stand = Stand(kubectl, stand_fleet, url, 3, tmp_path_factory.mktemp("routers"))
        whole(stand)  # while the Service leads to one router only: a trainer that asks the other one is not answered
    scale = ("scale", "deployment", f"{stand.name}-router")
    operator("scale", "deployment", "sglang-rollout-operator", "--replicas=0")
    stand.kubectl(*scale, "--replicas=2")
    try:
        eventually("both run", lambda: len(running(stand)) == 2, within=60)
        yield
    finally:
        stand.kubectl(*scale, "--replicas=1")
        operator("scale", "deployment", "sglang-rollout-operator", "--replicas=1")
        operator("rollout", "status", "deployment/sglang-rollout-operator", "--timeout=90s", timeout=100)
        eventually("one is left", lambda: len(running(stand)) == 1, within=240)
        eventually("it leads", lambda: lease(stand)["holderIdentity"] == next(iter(running(stand))), within=60)


def leader_and_other(stand: Stand) -> tuple[str, str]:
    """Return the names of the router pod whose coordinator leads and of the other one."""
    leader = str(lease(stand)["holderIdentity"])
    return leader, next(name for name in running(stand) if name != leader)


def running(stand: Stand) -> dict[str, str]:
    """Router pods that run and stay, with their addresses."""
    pods = stand.kubectl.list("pods", f"rollout.sglang.io/rollout={stand.name},{COMPONENT}")
    return {
        pod["metadata"]["name"]: pod["status"]["podIP"]
        for pod in pods
        if not pod["metadata"].get("deletionTimestamp") and pod["status"]["phase"] == "Running"
    }


def lease(stand: Stand) -> dict[str, Any]:
    """``spec`` of the coordinators' Lease."""
    return dict(stand.kubectl.get("lease", f"{stand.name}-router")["spec"])


@contextlib.contextmanager
def no_api_server(stand: Stand, pod: str) -> Iterator[None]:
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


def record(stand: Stand) -> dict[str, Any]:
    """The coordinators' record of the fleet."""
    return dict(json.loads(stand.kubectl.get("configmap", f"{stand.name}-weights")["data"]["weights.json"]))


def coordinator_log(stand: Stand, pod: str) -> str:
    """The log of a coordinator, that of the container before its last restart included."""
    lines = ""
    for previous in (["--previous"], []):
        with contextlib.suppress(Refused):  # it was never restarted
            lines += stand.kubectl("logs", pod, "-c", "coordinator", *previous)
    return lines


@pytest.mark.skipif(
    os.environ.get("CLUSTER", "lab") != "lab", reason="a coordinator is stopped from outside of its container: only the lab's can be"
)
def test_a_coordinator_that_comes_back_commits_nothing(two_routers: None, stand: Stand) -> None:
    old, new = leader_and_other(stand)
    trainer = stand.trainer(url=f"http://{running(stand)[old]}:30000")
    before = stand.push(trainer)
    term = lease(stand)["leaseTransitions"]
    for index in range(stand.engines):
        stand.fault(index, "slow", "check", seconds=6.0)
    with stand.kubectl.forward(f"pod/{old}", 30000) as theirs, stand.kubectl.forward(f"pod/{new}", 30000) as ours:
        trainer.begin(stand.label())
        eventually("the update is being verified", lambda: document(theirs)["phase"] == "verify", within=20, every=0.1)
        pid = coordinator_pid(old)
        os.kill(pid, signal.SIGSTOP)
        try:
            eventually("the Lease names the other one", lambda: lease(stand)["holderIdentity"] == new, within=60)
            assert lease(stand)["leaseTransitions"] > term
            eventually("it has proved what is committed", lambda: document(ours)["committed"]["label"] == before, within=60)
        finally:
            os.kill(pid, signal.SIGCONT)
        answer = trainer.outcome(90)
        assert not answer["ok"], "the old coordinator said that it had committed"
        assert document(ours)["committed"]["label"] == before
        following = stand.trainer(url=f"http://{running(stand)[new]}:30000")
        eventually("all engines are up", lambda: all(row["state"] != "unknown" for row in document(ours)["members"]), within=90)
        label = stand.push(following)
        assert document(ours)["committed"]["label"] == label
        eventually("the old one has given up and waits", lambda: lease(stand)["holderIdentity"] == new, within=10)
        eventually("all serve", lambda: document(ours)["serving"] == stand.engines, within=60)


@pytest.mark.skipif(
    os.environ.get("CLUSTER", "lab") != "lab", reason="a pod is cut off from the API server on its node: only the lab's can be"
)
def test_of_two_coordinators_that_lead_at_once_only_the_newer_one_changes_the_fleet(two_routers: None, stand: Stand) -> None:
    old, new = leader_and_other(stand)
    addresses = running(stand)
    first = stand.trainer(url=f"http://{addresses[old]}:30000")
    with (
        stand.kubectl.forward(f"pod/{old}", 30000) as theirs,
        stand.kubectl.forward(f"pod/{new}", 30000) as ours,
        ThreadPoolExecutor(1) as pool,
    ):
        expected = {"base": first.base}
        watches = [Watch(url, expected) for url in (theirs, ours)]
        before = stand.push(first, watches[0])
        for watch in watches:
            watch.committed(before)
            watch.start(FEW, FEW)
        term = record(stand)["term"]
        connecting = pool.submit(stand.trainer, url=f"http://{addresses[new]}:30000")  # it is answered when the new one leads
        for index in range(stand.engines):
            stand.fault(index, "slow", "check", seconds=6.0)
        lost = stand.label()
        expected[lost] = first.begin(lost)
        eventually("the old one verifies its update", lambda: document(theirs)["phase"] == "verify", within=20, every=0.1)
        with no_api_server(stand, old):
            # What the Lease is when the old one could not renew it for long enough. The old one cannot see it.
            free = {"spec": {"holderIdentity": ""}}
            stand.kubectl("patch", "lease", f"{stand.name}-router", "--type=merge", "-p", json.dumps(free))
            eventually(
                "the new one leads and has proved what is committed", lambda: document(ours)["committed"]["label"] == before, within=30
            )
            second, label = connecting.result(60), stand.label()
            expected[label] = second.begin(label)
            refused = first.outcome(60)
            assert not refused["ok"], "the old coordinator said that it had committed"
            for watch in watches:
                watch.failed(lost)
            answer = second.outcome(60)
            for watch in watches:
                (watch.committed if answer["ok"] else watch.failed)(label)
            if not answer["ok"]:  # it began in the middle of the old one's update
                push_until_committed(stand, second, watches)
            said = coordinator_log(stand, old)
            assert f"this one is of term {term}" in said, said[-2000:]
            again = stand.label()
            expected[again] = first.begin(again)
            assert not first.outcome(60)["ok"], "the old coordinator took an update although it cannot lead"
        eventually("the old one waits", lambda: f"{new} leads: waiting" in coordinator_log(stand, old), within=60)
        # An engine that was in the old one's update may have been restarted, and then waits for the next push.
        eventually("all engines are up", lambda: all(row["rank_offset"] is not None for row in document(ours)["members"]), within=90)
        label = push_until_committed(stand, second, watches)
        eventually("all serve", lambda: document(ours)["serving"] == stand.engines, within=60)
        assert (record(stand)["term"], record(stand)["committed"]["label"]) == (document(ours)["term"], label)
        assert record(stand)["term"] > term
        assert [stand.state(index)["weight_version"] for index in range(stand.engines)] == [label] * stand.engines
        answers = [watch.answers for watch in watches]
        eventually(
            "clients of both routers get answers",
            lambda: all(watch.answers > count for watch, count in zip(watches, answers, strict=True)),
            within=30,
        )
        for watch in watches:
            watch.stop()
        assert [watch.violations for watch in watches] == [[], []]


def push_until_committed(stand: Stand, trainer: Trainer, watches: list[Watch]) -> str:
    """Push until a version is committed; its label. Engines that were in the other coordinator's update may have to be taken out of it."""
    deadline = time.monotonic() + 60
    while True:
        label = stand.label()
        watches[0].expected[label] = trainer.begin(label)
        answer = trainer.outcome(60)
        if answer["ok"]:
            for watch in watches:
                watch.committed(label)
            return label
        for watch in watches:
            watch.failed(label)
        assert time.monotonic() < deadline, answer
