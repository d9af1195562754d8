"""Processes and pods end. The fleet serves only the committed version, and recovers without help."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from e2e import stand_in
from e2e.cases.actions import Client, document, generate, push, serving
from e2e.kube import Kubectl, condition, eventually


def members(url: str) -> dict[str, dict[str, Any]]:
    """Return the engines' rows of the discovery document, by name."""
    return {row["name"]: row for row in document(url)["members"]}


def member(url: str, name: str) -> dict[str, Any]:
    """Return one engine's row."""
    return members(url)[name]


def restarts(kubectl: Kubectl, pod: str, container: str) -> int:
    """Return how often a container of a pod has been restarted. Sidecars are init containers."""
    status = kubectl.get("pod", pod)["status"]
    rows = status.get("containerStatuses", []) + status.get("initContainerStatuses", [])
    return next(int(row["restartCount"]) for row in rows if row["name"] == container)


def router_pod(kubectl: Kubectl, fleet: str) -> str:
    """Return the name of the router's running pod."""
    pods = kubectl.list("pods", f"rollout.sglang.io/rollout={fleet},app.kubernetes.io/component=router")
    return next(str(pod["metadata"]["name"]) for pod in pods if not pod["metadata"].get("deletionTimestamp"))


@pytest.mark.parametrize("how", ["container", "pod"])
def test_restarted_engine_is_fenced_until_it_loads_the_version(kubectl: Kubectl, fleet: str, url: str, client: str, how: str) -> None:
    version = {"container": "201", "pod": "203"}[how]
    push(kubectl, fleet, version, seed=int(version))
    victim = f"{fleet}-engine-1"
    boot = member(url, victim)["boot_id"]
    with Client(url) as user:
        time.sleep(2)
        if how == "container":
            kubectl.exec(f"{victim}-0", "touch", "/run/rollout/kill", container="engine")
        else:
            kubectl("delete", "pod", f"{victim}-0", "--grace-period=1", "--wait=false")
        killed = time.time()
        eventually("the engine is fenced", lambda: not member(url, victim)["gate_open"])
        eventually(
            "the engine has a new boot ID",
            lambda: member(url, victim)["boot_id"] not in (None, boot) and member(url, victim)["state"] == "clean",
            within=300,
            every=2,
        )
        assert not member(url, victim)["gate_open"], "the engine holds base weights"
        assert member(url, victim)["reason"], "the row has the reason for the closed gate"
        assert document(url)["serving"] == 1
    assert set(user.versions) == {version}, "no answer from any other version"
    assert len(user.answers) == 1, "greedy tokens of exactly one set of weights"
    late = [entry for entry in user.failures if entry[0] > killed + 90]
    assert not late, late
    assert len(user.failures) <= 2 * 2, f"only requests in flight on the killed engine may fail: {user.failures}"

    following = str(int(version) + 1)
    after = push(kubectl, fleet, following, seed=int(following))
    assert {answer["version"] for answer in after["engines"].values()} == {following}
    serving(url, 2)


@pytest.mark.parametrize("part", ["coordinator", "batches", "smg", "front"])
def test_restarted_router_process_keeps_the_version(kubectl: Kubectl, fleet: str, url: str, both_serve: None, part: str) -> None:
    committed = document(url)["committed"]
    pod = router_pod(kubectl, fleet)
    before = restarts(kubectl, pod, part)
    kubectl.exec(pod, "sh", "-c", "kill -TERM 1", container=part)
    eventually(f"the kubelet restarted {part}", lambda: restarts(kubectl, pod, part) > before)

    def generates() -> bool:
        """Try in a forwarding of its own: kubectl ends one whose connection meets no listener."""
        with kubectl.forward(f"svc/{fleet}-router", 30000) as attempt:
            return generate(attempt).status_code == 200

    eventually("the fleet generates again", generates)
    with kubectl.forward(f"svc/{fleet}-router", 30000) as again:
        serving(again, 2)
        seen = document(again)
        assert seen["committed"] == committed
        assert generate(again).json()["meta_info"]["weight_version"] == committed["label"]


def test_operator_restart_changes_no_child(kubectl: Kubectl, operator: Kubectl, fleet: str) -> None:
    def children() -> dict[str, str]:
        """Return all that the operator writes: everything but status and the coordinator's record."""
        kinds = "statefulsets,deployments,services,serviceaccounts,roles,rolebindings,networkpolicies,secrets,configmaps"
        found = {}
        for row in kubectl.list(kinds, f"rollout.sglang.io/rollout={fleet}"):
            row.pop("status", None)
            meta = row["metadata"]
            meta["managedFields"] = [entry for entry in meta.get("managedFields", []) if entry.get("subresource") != "status"]
            meta.pop("resourceVersion")
            if meta["name"] != f"{fleet}-weights":
                found[f"{row['kind']}/{meta['name']}"] = json.dumps(row, sort_keys=True)
        return found

    before = children()
    assert before
    operator("rollout", "restart", "deployment/sglang-rollout-operator")
    operator("rollout", "status", "deployment/sglang-rollout-operator", "--timeout=120s", timeout=150)
    time.sleep(10)
    assert children() == before


def test_deleted_child_is_recreated(kubectl: Kubectl, fleet: str, url: str, both_serve: None) -> None:
    old = kubectl.get("service", f"{fleet}-engines")["metadata"]["uid"]
    kubectl("delete", "service", f"{fleet}-engines")
    eventually("the Service is recreated", lambda: kubectl.get("service", f"{fleet}-engines")["metadata"]["uid"] != old)
    # Its endpoints are gone, too: the coordinator may see no engine for a moment, and the front answers 503.
    serving(url, 2)
    eventually("the fleet generates", lambda: generate(url).status_code == 200)
    both = {f"{fleet}-engine-0": True, f"{fleet}-engine-1": True}
    assert eventually("both gates are open", lambda: {name: row["gate_open"] for name, row in members(url).items()} == both)


def test_rollout_deleted_during_its_start_is_gone_before_its_grace_period_ends(kubectl: Kubectl, operator: Kubectl) -> None:
    """Its containers receive SIGTERM before they handle signals, and the grace period of a pod is minutes."""
    kubectl.apply(stand_in.code())
    pods = "rollout.sglang.io/rollout=brief"
    for seconds in (0, 1, 3):
        kubectl.apply(stand_in.rollout("brief", replicas=1))
        eventually("the rollout has pods", lambda: len(kubectl.list("pods", pods)) == 2)
        time.sleep(seconds)
        kubectl("delete", "sglr", "brief", "--wait=false")
        assert eventually("the pods are gone", lambda: not kubectl.list("pods", pods), within=100, every=1)


def test_scaling_adds_and_removes_engines(kubectl: Kubectl, fleet: str, url: str, both_serve: None) -> None:
    push(kubectl, fleet, "300", seed=300)
    kubectl("scale", "sglr", fleet, "--replicas=1")
    eventually("one engine is left", lambda: len(document(url)["members"]) == 1, every=1)
    pods = f"rollout.sglang.io/rollout={fleet},app.kubernetes.io/component=engine"
    eventually("the other engine's pod is gone", lambda: len(kubectl.list("pods", pods)) == 1, every=1)
    assert generate(url).status_code == 200
    kubectl("scale", "sglr", fleet, "--replicas=2")
    newcomer = f"{fleet}-engine-1"
    eventually("the second engine is up", lambda: member(url, newcomer)["state"] == "clean", within=300, every=2)
    assert not member(url, newcomer)["gate_open"], "the engine missed the version"
    push(kubectl, fleet, "301", seed=301)
    serving(url, 2)


def test_rolling_update_replaces_one_engine_at_a_time(kubectl: Kubectl, fleet: str, url: str, both_serve: None) -> None:
    """The second engine waits until the first serves again, which takes a push."""
    push(kubectl, fleet, "400", seed=400)  # restarted engines hold the weights of the model's path, not this version
    uids = {name: kubectl.get("pod", f"{name}-0")["metadata"]["uid"] for name in (f"{fleet}-engine-0", f"{fleet}-engine-1")}
    env = [*kubectl.get("sglr", fleet)["spec"]["engine"]["env"], {"name": "ROLLED", "value": "yes"}]
    kubectl("patch", "sglr", fleet, "--type=merge", "-p", json.dumps({"spec": {"engine": {"env": env}}}))

    def replaced() -> set[str]:
        pods = {
            pod["metadata"]["name"].removesuffix("-0"): pod
            for pod in kubectl.list("pods", f"rollout.sglang.io/rollout={fleet},app.kubernetes.io/component=engine")
        }
        return {name for name, uid in uids.items() if name in pods and pods[name]["metadata"]["uid"] != uid}

    eventually("the first engine is replaced", lambda: len(replaced()) == 1)
    time.sleep(5)
    assert len(replaced()) == 1, "the second waits for the first"
    first = f"{fleet}-engine-{next(iter(replaced()))[-1]}"
    eventually("the new engine is up", lambda: member(url, first)["state"] == "clean", within=300, every=2)
    eventually("status names what the update waits for", lambda: "serve" in condition(kubectl.get("sglr", fleet), "Ready")["message"])
    push(kubectl, fleet, "401", seed=401)
    eventually("the second engine is replaced when the first serves", lambda: len(replaced()) == 2)
    eventually("all engines are updated", lambda: kubectl.get("sglr", fleet)["status"]["updatedReplicas"] == 2, within=300, every=2)
    serving(url, 1)
    second = next(name for name in uids if name != first)
    eventually("the second engine is up", lambda: member(url, second)["state"] == "clean", within=300, every=2)
    push(kubectl, fleet, "402", seed=402)
    serving(url, 2)
