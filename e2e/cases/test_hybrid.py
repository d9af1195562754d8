"""``mode: Hybrid`` with real engines, and a trainer in its own pod on their node.

In each step the trainer wakes the engines, pushes handles of its tensors at each engine's own URL, samples, and puts the engines to sleep.

On a CPU, the handles are files in shared memory, so all pods mount one folder of the node as /dev/shm. A stand-in overwrites released
memory (images/engine-cpu/README.md).
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from e2e import stand_in
from e2e.cases.conftest import NAME, remove, remove_stand, sample
from e2e.kube import Kubectl, condition, eventually

POLICY = "hybrid"
TRAINER = (pathlib.Path(__file__).parent / "hybrid_trainer.py").read_text()
SHARED_MEMORY = {"name": "ckpt", "mountPath": "/dev/shm"}
ENGINES = [f"http://{POLICY}-engine-{index}-0.{POLICY}-engines:30000" for index in range(2)]
FLEET = f"http://{POLICY}-router:30000"


def trainer() -> dict[str, Any]:
    """Return a pod that shares memory with the engines. It is created first, because the engines follow it to its node."""
    made = stand_in.trainer_pod(POLICY)
    made["metadata"]["labels"] = {"app": POLICY}
    container = made["spec"]["containers"][0]
    container["volumeMounts"].append(SHARED_MEMORY)
    container["env"].append({"name": "TMPDIR", "value": "/dev/shm"})  # for the socket of torch's process that serves the handles
    return made


@pytest.fixture
def policy(kubectl: Kubectl, operator: Kubectl) -> Iterator[str]:
    """Create a rollout of two sleeping engines, and return its name."""
    remove_stand(kubectl)
    remove(kubectl, NAME)  # the node has no room for both fleets
    kubectl.apply(stand_in.code())
    kubectl("delete", "pod", POLICY, "--ignore-not-found", timeout=90)
    kubectl.apply(trainer())
    made = sample(POLICY, memorySaver=True)
    made["spec"] |= {"replicas": 2, "mode": "Hybrid", "sharing": {"trainerLabels": {"app": POLICY}}}
    volume = next(volume for volume in trainer()["spec"]["volumes"] if volume["name"] == "ckpt")
    made["spec"]["podTemplate"] = {"spec": {"containers": [{"name": "engine", "volumeMounts": [SHARED_MEMORY]}], "volumes": [volume]}}
    kubectl.apply(made)
    eventually("the fleet sleeps", lambda: ready(kubectl)["reason"] == "AsleepForTrainer", within=400, every=2)
    yield POLICY
    kubectl("delete", "pod", POLICY, "--ignore-not-found", "--wait=false")
    remove(kubectl, POLICY)


def ready(kubectl: Kubectl) -> dict[str, str]:
    return condition(kubectl.get("sglr", POLICY), "Ready")


def step(kubectl: Kubectl, version: str, seed: int) -> dict[str, Any]:
    """Run one step of the trainer and return its output."""
    words = ["/models/tiny", str(seed), version, "[11, 22, 33]", "8", FLEET, *ENGINES]
    out = kubectl.exec(POLICY, "python", "-", *words, container="trainer", stdin=TRAINER, timeout=240)
    return dict(json.loads(out.strip().splitlines()[-1]))


def test_colocated_trainer_pushes_to_each_engine(kubectl: Kubectl, policy: str) -> None:
    assert "the trainer uses the memory of 2 of 2 engines" in ready(kubectl)["message"]
    seen = []
    for seed, version in ((1, "5"), (2, "6")):
        saw = step(kubectl, version, seed)
        assert saw["answers"] == {url: [saw["expected"], version] for url in (*ENGINES, FLEET)}
        seen.append(saw["expected"])

        def is_committed(version: str = version) -> bool:
            weights = kubectl.get("sglr", policy)["status"]["weights"]
            return bool(weights["committedVersion"] == version and weights["lastUpdate"]["outcome"] == "Committed")

        eventually("status names the version", is_committed)
        eventually("the fleet sleeps again", lambda: ready(kubectl)["reason"] == "AsleepForTrainer")
    assert seen[0] != seen[1], "other weights, other tokens"
