"""All pods of one trainer are one caller."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_rollout.coordinator.callers.pods import MAX_OWNER_CHARACTERS, parse_pod
from tests.support.pods import make_pod

HASH = {"pod-template-hash": "7d9c8f"}
JOBSET = {"jobset.sigs.k8s.io/jobset-name": "train"}
LWS = {"leaderworkerset.sigs.k8s.io/name": "train"}
MPI = {"training.kubeflow.org/job-name": "train"}

SAME = {
    "Job": [("a", {"owner": "Job/train"}), ("b", {"owner": "Job/train"})],
    "RayCluster with two ServiceAccounts": [
        ("head", {"owner": "RayCluster/train", "account": "autoscaler"}),
        ("worker", {"owner": "RayCluster/train", "account": "default"}),
    ],
    "JobSet": [("a", {"owner": "Job/train-driver-0", "labels": JOBSET}), ("b", {"owner": "Job/train-workers-0", "labels": JOBSET})],
    "LeaderWorkerSet": [
        ("train-0", {"owner": "StatefulSet/train", "labels": LWS}),
        ("train-0-1", {"owner": "StatefulSet/train-0", "labels": LWS}),
    ],
    "MPIJob": [("launcher", {"owner": "Job/train-launcher", "labels": MPI}), ("worker", {"owner": "MPIJob/train", "labels": MPI})],
    "Deployment with a changed template": [
        ("a", {"owner": "ReplicaSet/train-7d9c8f", "labels": HASH}),
        ("b", {"owner": "ReplicaSet/train-55aa1", "labels": {"pod-template-hash": "55aa1"}}),
    ],
}
DIFFERENT = {
    "Jobs": [("a", {"owner": "Job/anne"}), ("b", {"owner": "Job/ben"})],
    "namespaces": [("a", {"namespace": "ml"}), ("a", {"namespace": "other"})],
    "kinds": [("a", {"owner": "Job/train"}), ("b", {"owner": "StatefulSet/train"})],
    "pods without a controller": [("a", {"owner": ""}), ("b", {"owner": ""})],
    "JobSets": [("a", {"owner": "Job/a", "labels": JOBSET}), ("b", {"owner": "Job/b", "labels": {**JOBSET, next(iter(JOBSET)): "other"}})],
}


def callers(pods: list[tuple[str, dict[str, Any]]]) -> set[str]:
    parsed = [parse_pod(make_pod(name, **settings)) for name, settings in pods]
    return {str(pod.caller) for pod in parsed if pod is not None}


@pytest.mark.parametrize("pods", SAME.values(), ids=SAME)
def test_pods_of_one_trainer_are_one_caller(pods: list[tuple[str, dict[str, Any]]]) -> None:
    assert len(callers(pods)) == 1


@pytest.mark.parametrize("pods", DIFFERENT.values(), ids=DIFFERENT)
def test_pods_of_two_trainers_are_two_callers(pods: list[tuple[str, dict[str, Any]]]) -> None:
    assert len(callers(pods)) == 2


def test_a_caller_is_shown_by_namespace_and_owner() -> None:
    assert callers([("a", {"owner": "Job/train"})]) == {"ml/Job/train"}


@pytest.mark.parametrize(
    "owner",
    [
        "Job/train\n2026-11-23 INFO forged", "Job/a/b", f"Job/{'a' * 254}", "Job/Train", "Job/-train", "Job/", "job/train", "J b/train",
        f"{'J' * 64}/train", "Jöb/train", "Job/a..b",
    ],
)  # fmt: skip
def test_an_owner_that_no_kubernetes_object_can_be_is_ignored(owner: str) -> None:
    pod = make_pod("a")
    kind, _, name = owner.partition("/")
    pod["metadata"]["ownerReferences"] = [{"kind": kind, "name": name, "controller": True}]
    parsed = parse_pod(pod)
    assert parsed is not None
    assert str(parsed.caller) == "ml/Pod/a"


@pytest.mark.parametrize("labels", [{next(iter(LWS)): "Train"}, {next(iter(LWS)): ""}])
def test_a_label_that_no_kubernetes_object_can_have_as_its_name_is_ignored(labels: dict[str, str]) -> None:
    assert callers([("a", {"owner": "StatefulSet/train", "labels": labels})]) == {"ml/Pod/a"}


def test_the_longest_owner_is_accepted() -> None:
    kind, name = "K" + "k" * 62, ".".join(["n" * 63] * 3 + ["n" * 61])
    assert len(f"{kind}/{name}") == MAX_OWNER_CHARACTERS
    assert callers([("a", {"owner": f"{kind}/{name}"})]) == {f"ml/{kind}/{name}"}
