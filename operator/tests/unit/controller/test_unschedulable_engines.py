"""The status of engines without a node, and of what their cluster lacks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.plan import Apply, Delete, make_plan
from sglang_rollout.controller.decide.prerequisites import (
    Cluster,
    LargestNode,
    describe_gang_problem,
    describe_missing_queue,
    find_creation_errors,
    find_largest_node,
    find_queue_stop,
)
from sglang_rollout.controller.decide.status import build_status
from sglang_rollout.controller.decide.view import FleetView
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.hashing import revision
from tests.unit.controller.support.worlds import NOW, SETTINGS, cr, pod, ready, record, row, unschedulable, world

Object = dict[str, Any]
GATED = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "Scheduling is blocked"}]}


def homeless(index: int, *, gpus: int = 8, gate: str = "", status: Object | None = None) -> Object:
    """Return a pod without a node."""
    made = pod(index, ready=False, status=status or {})
    made["spec"] = {"containers": [{"name": "engine", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}]}
    if gate:
        made["spec"]["schedulingGates"] = [{"name": gate}]
    return made


def seen(*pods: Object, cluster: Cluster | None = None, **scheduling: Any) -> FleetView:
    """Return a fleet on GPUs whose pods are all up to date."""
    engine = {"image": "example.org/engine:1", "parallelism": {"tensor": 8}}
    custom = cr(replicas=2, engine=engine, scheduling=scheduling)
    for one in pods:
        one["metadata"]["labels"][names.LABEL_REVISION] = revision(SGLangRollout.model_validate(custom))
    made = world(list(pods), written=record(row(0), row(1)), custom=custom)
    return replace(made, cluster=cluster or Cluster())


def said(seen: FleetView, kind: str = "Ready") -> tuple[str, str, str]:
    found = next(one for one in build_status(seen, NOW)["conditions"] if one["type"] == kind)
    return found["status"], found["reason"], found["message"]


def test_queued_engine_does_not_degrade_the_fleet() -> None:
    gated = seen(pod(0), homeless(1, gate="kueue.x-k8s.io/admission", status=GATED), queueName="rollouts")
    assert said(gated) == (
        "False",
        "WaitingForQueue",
        "Engine demo-engine-1: it waits in queue rollouts until there is quota for all of its pods.",
    )
    assert said(gated, "Degraded")[0] == "False"
    assert build_status(gated, NOW)["engines"][1]["phase"] == "Pending"


def test_fleet_that_waits_for_room_or_quota_does_not_progress() -> None:
    full = homeless(1, status=unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu"))
    assert said(seen(pod(0), full), "Progressing") == (
        "False",
        "InsufficientCapacity",
        "Waiting: 1 of 2 engines. Engine demo-engine-1: no node can take its pod: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    )
    gated = [homeless(index, gate="kueue.x-k8s.io/admission", status=GATED) for index in range(2)]
    assert said(seen(*gated, queueName="rollouts"), "Progressing") == (
        "False",
        "WaitingForQueue",
        "Waiting: 2 of 2 engines. Engine demo-engine-0: it waits in queue rollouts until there is quota for all of its pods."
        " (1 more engine for the same reason.)",
    )
    assert said(seen(pod(0, ready=False), gated[1], queueName="rollouts"), "Progressing") == (
        "True",
        "Scaling",
        "1 of 2 engines are starting; 1 waiting.",
    )
    assert said(seen(pod(0), homeless(1)), "Progressing")[:2] == ("True", "Scaling"), "the scheduler has not looked at it yet"


def test_stopped_queue_is_reported_quoting_kueue() -> None:
    local = {"status": {"conditions": [{"type": "Active", "status": "False", "message": "ClusterQueue team doesn't exist"}]}}
    cluster = Cluster(queue_stopped=find_queue_stop(local))
    gated = seen(pod(0), homeless(1, gate="kueue.x-k8s.io/admission"), cluster=cluster, queueName="rollouts")
    assert said(gated)[2].endswith("it waits in queue rollouts, which is stopped: ClusterQueue team doesn't exist.")
    assert find_queue_stop({"status": {"conditions": [{"type": "Active", "status": "True", "message": "Can submit"}]}}) == ""
    assert find_queue_stop({}) == "", "Kueue has not looked at it yet"


def test_foreign_scheduling_gate_is_named() -> None:
    assert said(seen(pod(0), homeless(1, gate="example.org/quota-review")))[2].endswith("the scheduling gate example.org/quota-review.")


@pytest.mark.parametrize("installed", [True, False])
def test_missing_queue_degrades_the_fleet(installed: bool) -> None:
    problem = describe_missing_queue("rollouts", "rl", installed=installed)
    waiting = seen(pod(0), homeless(1), cluster=Cluster(queue_problem=problem), queueName="rollouts")
    assert said(waiting) == ("False", "QueueNotFound", problem)
    assert said(waiting, "Degraded") == ("True", "QueueNotFound", problem)
    assert said(waiting, "Progressing") == ("False", "QueueNotFound", problem)
    assert make_plan(waiting, SETTINGS).requeue_after is not None, "nothing else tells when the queue is made"


def test_missing_queue_does_not_affect_a_running_fleet() -> None:
    running = seen(
        pod(0), pod(1), cluster=Cluster(queue_problem=describe_missing_queue("rollouts", "rl", installed=True)), queueName="rollouts"
    )
    assert said(running)[:2] == ("True", "AllServing")


def test_other_children_are_created_without_pod_groups() -> None:
    lacking = seen(cluster=Cluster(gang_problem=describe_gang_problem()), gang={})
    empty = replace(lacking, children={})
    kinds = {action.object["kind"] for action in make_plan(empty, SETTINGS).actions if isinstance(action, Apply)}
    assert "StatefulSet" in kinds
    assert "PodGroup" not in kinds
    assert said(lacking)[1] == "GangNotPossible"
    assert "remove gang" in said(lacking)[2]
    assert make_plan(lacking, SETTINGS).requeue_after is not None


def test_pod_groups_are_pruned_with_the_gang() -> None:
    ganged = seen(pod(0), pod(1), gang={})
    groups = [key for key in ganged.children if key[0] == "PodGroup"]
    assert groups == [("PodGroup", "demo-engine-0"), ("PodGroup", "demo-engine-1")]
    plain = seen(pod(0), pod(1))
    left = replace(plain, children={**plain.children, **{key: ganged.children[key] for key in groups}})
    gone = [
        (action.kind, action.name)
        for action in make_plan(left, SETTINGS).actions
        if isinstance(action, Delete) and action.kind == "PodGroup"
    ]
    assert gone == groups[::-1]


def test_silent_scheduler_is_named() -> None:
    ignored = homeless(1)
    ignored["spec"]["schedulerName"] = "coscheduling"
    ignored["status"] = {"phase": "Pending"}
    assert said(seen(pod(0), ignored, gang={}))[2].endswith("it waits for coscheduling. Is that scheduler running?")
    ignored["status"] = unschedulable("pod group demo-engine-1 has no room")
    assert said(seen(pod(0), ignored, gang={}))[2].endswith("no node can take its pod: pod group demo-engine-1 has no room.")


NODES = [
    {"metadata": {"name": "small"}, "status": {"allocatable": {"nvidia.com/gpu": "4"}}},
    {"metadata": {"name": "large"}, "status": {"allocatable": {"nvidia.com/gpu": "6", "cpu": "96"}}},
    {"metadata": {"name": "none"}, "status": {"allocatable": {"cpu": "900"}}},
]


@pytest.mark.parametrize("gate", ["", "kueue.x-k8s.io/admission"])
def test_pod_larger_than_any_node_is_reported(gate: str) -> None:
    cluster = Cluster(largest=find_largest_node(NODES, "nvidia.com/gpu"))
    status, reason, message = said(seen(pod(0), homeless(1, gate=gate), cluster=cluster))
    assert (status, reason) == ("False", "InsufficientCapacity")
    assert "asks for 8 nvidia.com/gpu, and no node has so many: the largest, large, has 6" in message


def test_full_node_is_reported_by_the_scheduler() -> None:
    cluster = Cluster(largest=LargestNode("large", 8))
    full = homeless(1, status=unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu"))
    assert said(seen(pod(0), full, cluster=cluster))[2].endswith(
        "no node can take its pod: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    )


def test_cluster_without_gpus_names_the_device_plugin() -> None:
    cluster = Cluster(largest=find_largest_node([], "nvidia.com/gpu"))
    assert "no node offers nvidia.com/gpu now" in said(seen(pod(0), homeless(1), cluster=cluster))[2]


def test_unknown_node_sizes_are_not_mentioned() -> None:
    assert said(seen(pod(0), homeless(1)))[2].endswith("its pod waits for the scheduler.")


QUOTA = 'pods "demo-engine-1-0" is forbidden: exceeded quota: gpus, requested: nvidia.com/gpu=8, used: nvidia.com/gpu=8'


def failed_create(engine: str, words: str, *, first: str = "02:58:00", last: str = "02:59:00", uid: str = "") -> Object:
    message = f"create Pod {engine}-0 in StatefulSet {engine} failed error: {words}"
    times = {"firstTimestamp": f"2026-11-21T{first}Z", "lastTimestamp": f"2026-11-21T{last}Z"}
    return {"involvedObject": {"kind": "StatefulSet", "name": engine, "uid": uid}, "message": message, **times}


def unmade(*events: Object, made: int = 0, **spec: Any) -> FleetView:
    """Return a fleet whose second engine has ``made`` pods, as its controller reports."""
    found = seen(pod(0), **spec)
    live = found.children["StatefulSet", "demo-engine-1"]
    live["metadata"]["uid"] = "now"
    live["status"] = {"observedGeneration": 1, "replicas": made}
    return replace(
        found,
        cluster=Cluster(creation_errors=find_creation_errors(events, [live])),
    )


def test_pod_creation_error_is_reported_quoting_the_controller() -> None:
    refused = unmade(failed_create("demo-engine-1", "an old story", last="02:58:30"), failed_create("demo-engine-1", QUOTA, uid="now"))
    says = ("CreateFailed", f"Engine demo-engine-1: its pods cannot be created: {QUOTA}.")
    assert said(refused) == ("False", *says)
    assert said(refused, "Degraded") == ("True", *says)
    assert said(refused, "Progressing")[0] == "False"
    assert build_status(refused, NOW)["engines"][1]["phase"] == "Failed"
    assert make_plan(refused, SETTINGS, NOW).requeue_after is not None, "no event of ours tells when it changes"


@pytest.mark.parametrize(
    ("event", "made"),
    [
        (failed_create("demo-engine-1", "too early to tell", last="02:58:02"), 0),
        (failed_create("demo-engine-1", "of a StatefulSet that is gone", uid="before"), 0),
        (failed_create("demo-engine-0", QUOTA), 0),
        (failed_create("demo-engine-1", "of a pod that was made since"), 1),
    ],
)
def test_recent_creation_error_is_ignored(event: Object, made: int) -> None:
    assert said(unmade(event, made=made)) == ("False", "PodsNotReady", "Engine demo-engine-1: it has no pod yet.")


def test_surplus_engine_without_quota_waits_for_room() -> None:
    found = unmade(failed_create("demo-engine-1", QUOTA, uid="now"))
    wanted = {**found.cr, "spec": {**found.cr["spec"], "elastic": {"base": 1}}}
    elastic = replace(found, cr=wanted, rollout=SGLangRollout.model_validate(wanted))
    assert said(elastic)[1] == "BaseServing"
    row_of = build_status(elastic, NOW)["engines"][1]
    assert (row_of["phase"], row_of["message"]) == ("Pending", f"its pods cannot be created: {QUOTA}.")


@pytest.mark.parametrize(
    "message",
    [
        '0/3 nodes are available: persistentvolumeclaim "models" not found. preemption: not helpful.',
        'persistentvolumeclaim "models" is being deleted',
        "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
        '0/3 nodes are available: 3 resourceclaim "gpus-demo-engine-0" not found.',
    ],
)
def test_missing_claim_is_no_lack_of_room(message: str) -> None:
    seen = world([pod(0, ready=False, status=unschedulable(message)), pod(1)], written=record(row(0), row(1)))
    status, reason, text = ready(seen)
    assert (status, reason) == ("False", "ClaimUnavailable")
    assert "its pod waits for a claim: " in text
    full = unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
    assert ready(world([pod(0, ready=False, status=full), pod(1)], written=record(row(0), row(1))))[1] == "InsufficientCapacity"
