"""Two coordinators: one leads, the Lease says which, and the one that was believed dead can commit nothing when it comes back."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cases.actions import document
from e2e.cases.stand import Stand
from e2e.kube import Kubectl, eventually

COMPONENT = "app.kubernetes.io/component=router"


def coordinator_pid(pod: str) -> int:
    """The coordinator's process on this machine, which holds the lab. Raises LookupError."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if b"fleet" in words and words[0] != b"tini" and f"HOSTNAME={pod}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                return int(entry.name)
    raise LookupError(f"no coordinator of {pod} runs on this machine")


@pytest.fixture
def two_routers(stand: Stand, operator: Kubectl) -> Iterator[tuple[str, str]]:
    """Two router pods by hand, the leader's name first; the operator is away, because it would undo it."""
    scale = ("scale", "deployment", f"{stand.name}-router")
    operator("scale", "deployment", "sglang-rollout-operator", "--replicas=0")
    stand.kubectl(*scale, "--replicas=2")
    try:
        eventually("both run", lambda: len(running(stand)) == 2, within=60)
        leader = lease(stand)["holderIdentity"]
        yield leader, next(name for name in running(stand) if name != leader)
    finally:
        stand.kubectl(*scale, "--replicas=1")
        operator("scale", "deployment", "sglang-rollout-operator", "--replicas=1")
        operator("rollout", "status", "deployment/sglang-rollout-operator", "--timeout=90s", timeout=100)
        eventually("one is left", lambda: len(running(stand)) == 1, within=240)
        eventually("it leads", lambda: lease(stand)["holderIdentity"] == next(iter(running(stand))), within=60)


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


@pytest.mark.skipif(
    os.environ.get("CLUSTER", "lab") != "lab", reason="a coordinator is stopped from outside of its container: only the lab's can be"
)
def test_a_coordinator_that_comes_back_commits_nothing(stand: Stand, two_routers: tuple[str, str]) -> None:
    old, new = two_routers
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
