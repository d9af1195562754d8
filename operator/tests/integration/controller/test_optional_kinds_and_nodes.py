"""Kinds that some clusters lack, and nodes: status and actions of the operator as they appear and disappear."""

from __future__ import annotations

import json
from typing import Any

import pytest
from e2e.cluster.controlplane import ControlPlane

from sglang_rollout.kube.errors import Refused
from sglang_rollout.kube.resources import NODES, POD_GROUPS, ROLLOUTS, Object, Resource
from tests.integration.controller.support.operator_process import OperatorProcess, World, eventually, rollout

pytestmark = [pytest.mark.controlplane]

QUEUES = Resource("kueue.x-k8s.io/v1beta2", "localqueues", "LocalQueue")


def define(api: ControlPlane, resource: Resource) -> None:
    """Install a definition that accepts any spec."""
    singular, (group, version_name) = resource.kind.lower(), resource.api_version.split("/")
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": version_name, "served": True, "storage": True, "schema": {"openAPIV3Schema": anything}}
    names = {"plural": resource.plural, "singular": singular, "kind": resource.kind, "listKind": f"{resource.kind}List"}
    spec = {"group": group, "scope": "Namespaced", "names": names, "versions": [version]}
    metadata = {
        "name": f"{resource.plural}.{group}",
        # Groups of Kubernetes' own domain need it.
        "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
    }
    definition = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": metadata, "spec": spec}
    api.kubectl("apply", "-f", "-", stdin=json.dumps(definition))
    api.wait_for_crd(f"{resource.plural}.{group}")


def forget(api: ControlPlane, resource: Resource) -> None:
    api.kubectl("delete", "crd", f"{resource.plural}.{resource.api_version.partition('/')[0]}", "--ignore-not-found", "--timeout=20s")


async def reason(world: World, wanted: str) -> str:
    """Wait for a reason of Ready, and return its message."""

    async def there() -> str:
        found = await world.condition("demo")
        assert found.get("reason") == wanted, found
        return str(found["message"])

    return str(await eventually(wanted, there, seconds=90))


async def groups(world: World) -> dict[str, Object]:
    return {item["metadata"]["name"]: item for item in (await world.kube.list(POD_GROUPS, world.namespace)).items}


async def test_gang_waits_for_the_kind_of_pod_groups(api: ControlPlane, operator: OperatorProcess, world: World) -> None:
    await world.kube.create(rollout("demo", world.namespace, scheduling={"gang": {}}))
    assert "install a scheduler with coscheduling" in await reason(world, "GangNotPossible")
    assert await world.is_degraded("demo", "GangNotPossible")
    await eventually("everything else", lambda: world.is_complete("demo"))
    define(api, POD_GROUPS)
    try:

        async def made() -> bool:
            return set(await groups(world)) == {"demo-engine-0", "demo-engine-1"}

        await eventually("the PodGroups", made)
        first = (await groups(world))["demo-engine-0"]
        assert first["spec"] == {"minMember": 1, "scheduleTimeoutSeconds": 60}
        assert first["metadata"]["ownerReferences"][0]["name"] == "demo"
        for name, pod in (await world.pods("demo")).items():
            assert pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == name.removesuffix("-0")
            assert pod["spec"]["schedulerName"] == "scheduler-plugins-scheduler"

        await world.kube.merge_patch(ROLLOUTS, world.namespace, "demo", {"spec": {"replicas": 1}})
        await eventually("one PodGroup", lambda: only(world, {"demo-engine-0"}))
        await world.kube.merge_patch(ROLLOUTS, world.namespace, "demo", {"spec": {"scheduling": {"gang": None}}})
        await eventually("no PodGroup", lambda: only(world, set()))
    finally:
        forget(api, POD_GROUPS)
    assert operator.health() == 200
    assert "ERROR" not in operator.said()


async def only(world: World, names: set[str]) -> bool:
    return set(await groups(world)) == names


async def test_missing_queue_is_reported_with_advice(api: ControlPlane, operator: OperatorProcess, world: World) -> None:
    await world.kube.create(rollout("demo", world.namespace, scheduling={"queueName": "rollouts"}))
    assert "this cluster has no Kueue" in await reason(world, "QueueNotFound")
    assert await world.is_degraded("demo", "QueueNotFound")
    define(api, QUEUES)
    try:

        async def no_queue() -> bool:
            return "has no LocalQueue of that name" in await reason(world, "QueueNotFound")

        await eventually("Kueue is seen", no_queue)
        for child in (await world.children("demo")).values():
            queued = child["metadata"]["labels"].get("kueue.x-k8s.io/queue-name")
            assert queued == ("rollouts" if child["kind"] == "StatefulSet" else None)
        made = {"apiVersion": QUEUES.api_version, "kind": QUEUES.kind, "metadata": {"name": "rollouts", "namespace": world.namespace}}
        api.kubectl("apply", "-f", "-", stdin=json.dumps(made))
        await reason(world, "RouterNotReady")  # no kubelet runs here
    finally:
        forget(api, QUEUES)
    assert operator.health() == 200


async def test_queue_changes_only_while_no_engine_runs(world: World) -> None:
    """Kueue would refuse the change for each running engine. The API server refuses it for the rollout, with advice."""

    async def change(**spec: Any) -> None:
        await world.kube.merge_patch(ROLLOUTS, world.namespace, "demo", {"spec": spec})

    await world.kube.create(rollout("demo", world.namespace, scheduling={"queueName": "rollouts"}))
    for other in ("others", None):
        with pytest.raises(Refused, match="set state to Suspended first"):
            await change(scheduling={"queueName": other})
    await change(scheduling={"nodeSelector": {"gpu": "h200"}})
    await change(state="Suspended", scheduling={"queueName": "others"})
    await change(state="Active", scheduling={"queueName": None})
    with pytest.raises(Refused, match="set state to Suspended first"):
        await change(scheduling={"queueName": "rollouts"})


async def test_ports_on_nodes_move_only_past_ports_in_use(world: World) -> None:
    """Engines restart one by one. The first would wait for a port of the second, and the second for the first to serve."""

    async def move(base: int, **spec: Any) -> None:
        engine = {"network": {"hostNetwork": True, "basePort": base}}
        await world.kube.merge_patch(ROLLOUTS, world.namespace, "demo", {"spec": {"engine": engine, **spec}})

    network = {"hostNetwork": True}
    await world.kube.create(rollout("demo", world.namespace, replicas=2, engine={"image": "img:1", "gpuResource": "", "network": network}))
    for base in (20020, 19980):
        with pytest.raises(Refused, match="set state to Suspended first"):
            await move(base)
    for base in (20040, 20000, 19960):
        await move(base)
    await move(19980, state="Suspended")
    await move(19960, state="Active")
    with pytest.raises(Refused, match="must not exceed 30000"):
        await move(29980)


async def test_pods_refused_by_a_quota_are_reported_and_created_when_it_is_raised(
    api: ControlPlane, operator: OperatorProcess, world: World
) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few", "namespace": world.namespace}}
    api.kubectl("apply", "-f", "-", stdin=json.dumps({**quota, "spec": {"hard": {"pods": "0"}}}))
    await eventually("the quota", lambda: _counted(api, world))
    await world.kube.create(rollout("demo", world.namespace))
    said = await reason(world, "CreateFailed")
    assert "its pods cannot be created: pods" in said
    assert "exceeded quota: few" in said
    assert (await world.condition("demo", "Degraded"))["reason"] == "CreateFailed"
    # Another size of the pods' group is applied although no pod is there.
    change = {"spec": {"engine": {"parallelism": {"tensor": 2}, "nodes": 2}}}
    await world.kube.merge_patch(ROLLOUTS, world.namespace, "demo", change)

    async def resized() -> bool:
        sizes = {child["spec"]["replicas"] for key, child in (await world.children("demo")).items() if key[0] == "StatefulSet"}
        return sizes == {2}

    await eventually("engines of two pods", resized)
    api.kubectl("delete", "resourcequota", "few", "-n", world.namespace)

    async def made() -> bool:
        return len(await world.pods("demo")) == 4

    await eventually("pods", made, seconds=60)
    await reason(world, "RouterNotReady")


async def _counted(api: ControlPlane, world: World) -> bool:
    return bool(api.get("resourcequota", "few", "-n", world.namespace).get("status", {}).get("hard"))


async def test_request_for_more_gpus_than_any_node_has_is_reported(api: ControlPlane, operator: OperatorProcess, world: World) -> None:
    await _node(api, world, "large", 4)
    await _node(api, world, "small", 2)
    try:
        engine: dict[str, Any] = {"image": "img:1", "parallelism": {"tensor": 8}, "gpuResource": "nvidia.com/gpu"}
        await world.kube.create(rollout("demo", world.namespace, engine=engine))
        said = await reason(world, "InsufficientCapacity")
        assert "asks for 8 nvidia.com/gpu, and no node has so many: the largest, large, has 4" in said
        assert await world.is_degraded("demo", "InsufficientCapacity")
        await _node(api, world, "larger", 8)
        # A new node belongs to no rollout: the next reconcile sees it.
        await world.kube.merge_patch(ROLLOUTS, world.namespace, "demo", {"spec": {"router": {"policy": "Random"}}})
        await reason(world, "RouterNotReady")
    finally:
        api.kubectl("delete", "node", "large", "small", "larger", "--ignore-not-found")


async def _node(api: ControlPlane, world: World, name: str, gpus: int) -> None:
    api.kubectl("create", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}))
    room = {"nvidia.com/gpu": str(gpus)}
    await world.kube.merge_patch(NODES, None, name, {"status": {"capacity": room, "allocatable": room}}, subresource="status")
