"""Other clients and other operators that want something else than the operator, on a real API server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from e2e.cluster.controlplane import ControlPlane

from sglang_rollout.controller.standing import LEASE_NAME
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import NotFound
from sglang_rollout.kube.resources import CONFIGMAPS, DEPLOYMENTS, EVENTS, LEASES, ROLLOUTS, SERVICES
from tests.integration.controller.support.operator_process import OperatorProcess, World, eventually, rollout

pytestmark = [pytest.mark.controlplane]

FIGHT_SECONDS = 20.0
MOST_RESTORES = 10
"""Three restores at once, then after 1, 2, 4 and 8 s. Without a delay there were 80 and more."""

Move = Callable[[Kube, str], Awaitable[None]]


@pytest.fixture
async def rival(api: ControlPlane) -> AsyncIterator[Kube]:
    async with await Kube.connect(field_manager="argocd-controller", kubeconfig=str(api.kubeconfig)) as kube:
        yield kube


async def scale_router(kube: Kube, namespace: str) -> None:
    if (await kube.get(DEPLOYMENTS, namespace, "demo-router"))["spec"]["replicas"] != 3:
        await kube.merge_patch(DEPLOYMENTS, namespace, "demo-router", {"spec": {"replicas": 3}})


async def change_image(kube: Kube, namespace: str) -> None:
    live = await kube.get(DEPLOYMENTS, namespace, "demo-router")
    containers = live["spec"]["template"]["spec"]["containers"]
    if containers[0]["image"] != "other:1":
        containers[0]["image"] = "other:1"
        await kube.merge_patch(DEPLOYMENTS, namespace, "demo-router", {"spec": {"template": {"spec": {"containers": containers}}}})


async def remove_label(kube: Kube, namespace: str) -> None:
    if "app.kubernetes.io/managed-by" in (await kube.get(SERVICES, namespace, "demo-router"))["metadata"]["labels"]:
        labels = {"app.kubernetes.io/managed-by": None}
        await kube.merge_patch(SERVICES, namespace, "demo-router", {"metadata": {"labels": labels}})


async def delete_intent(kube: Kube, namespace: str) -> None:
    await kube.delete(CONFIGMAPS, namespace, "demo-intent", uid=(await kube.get(CONFIGMAPS, namespace, "demo-intent"))["metadata"]["uid"])


async def fight(kube: Kube, namespace: str, move: Move, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(NotFound):
            await move(kube, namespace)
        await asyncio.sleep(0.05)


def count_restores(operator: OperatorProcess) -> int:
    return operator.said().count(": applied ")


@pytest.mark.parametrize(
    ("move", "named"),
    [
        (scale_router, "spec.replicas of Deployment demo-router is changed again and again by another client, the field manager argocd-"),
        (change_image, "image of Deployment demo-router is changed again and again by another client, the field manager argocd-"),
        (remove_label, "Service demo-router is changed again and again by another client"),
        (delete_intent, "ConfigMap demo-intent is changed again and again by another client"),
    ],
)
async def test_fight_about_a_child_slows_down_and_is_reported(
    operator: OperatorProcess, world: World, rival: Kube, move: Move, named: str
) -> None:
    await world.kube.create(rollout("demo", world.namespace))
    await world.serve("demo", 2)
    await world.settled("demo")
    before = count_restores(operator)
    await fight(rival, world.namespace, move, FIGHT_SECONDS)
    restores = count_restores(operator) - before
    print(f"{restores} restores in {FIGHT_SECONDS:.0f} s")
    assert 3 <= restores <= MOST_RESTORES
    degraded = await world.condition("demo", "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "FieldsContested")
    assert named in degraded["message"]
    events = (await world.kube.list(EVENTS, world.namespace, fields={"reason": "FieldsContested"})).items
    assert [event["message"] for event in events] == [degraded["message"]]
    # The spec still works, and what the fight is about is restored once it is over.
    await world.kube.merge_patch(SERVICES, world.namespace, "demo-engines", {"spec": {"publishNotReadyAddresses": False}})

    async def restored() -> bool:
        other = await world.kube.get(SERVICES, world.namespace, "demo-engines")
        router = await world.kube.get(DEPLOYMENTS, world.namespace, "demo-router")
        intent = await world.kube.get(CONFIGMAPS, world.namespace, "demo-intent")
        return bool(other["spec"].get("publishNotReadyAddresses") and router["spec"]["replicas"] == 1 and intent)

    await eventually("all children as rendered", restored, seconds=40)


async def router_image(world: World) -> tuple[int, str]:
    router = await world.kube.get(DEPLOYMENTS, world.namespace, "demo-router")
    return router["metadata"]["generation"], router["spec"]["template"]["spec"]["containers"][0]["image"]


async def test_second_operator_changes_nothing_reports_itself_and_takes_over(
    api: ControlPlane, operator: OperatorProcess, world: World, tmp_path: Path
) -> None:
    await world.kube.create(rollout("demo", world.namespace))
    await world.serve("demo", 2)
    await world.settled("demo")
    before, restores = await router_image(world), count_restores(operator)
    flags = (*operator.flags, "--router-image=second.example/router:2")
    second = OperatorProcess(api.kubeconfig, [world.namespace], tmp_path / "second.log", flags=flags)
    second.start()
    try:

        async def find_event() -> str:
            events = (await world.kube.list(EVENTS, world.namespace, fields={"reason": "AnotherOperator"})).items
            return str(events[0]["message"]) if events else ""

        message = await eventually("an Event about the second operator", find_event, seconds=60)
        assert "sglang-rollout-operator" in message
        assert message.count("/") >= 2, "both operators are named"
        assert "watchNamespaces" in message
        await world.kube.merge_patch(DEPLOYMENTS, world.namespace, "demo-router", {"spec": {"replicas": 2}})
        await world.settled("demo")
        assert (await router_image(world))[1] == before[1]
        assert count_restores(operator) == restores + 1
        assert count_restores(second) == 0, second.said()
        assert not [line for line in second.said().splitlines() if "ERROR" in line]

        assert operator.stop() == 0
        stopped = time.monotonic()

        async def has_taken_over() -> bool:
            return (await router_image(world))[1] == "second.example/router:2"

        await eventually("the second operator acts", has_taken_over, seconds=40)
        assert time.monotonic() - stopped < 20, "the first operator has released its Lease"
    finally:
        second.stop(9)


async def test_the_operators_lease_is_deleted_with_the_last_rollout(operator: OperatorProcess, world: World) -> None:
    made = await world.kube.create(rollout("demo", world.namespace))

    async def has_lease() -> bool:
        with contextlib.suppress(NotFound):
            owners = (await world.kube.get(LEASES, world.namespace, LEASE_NAME))["metadata"]["ownerReferences"]
            return [owner["uid"] for owner in owners] == [made["metadata"]["uid"]]
        return False

    async def has_none() -> bool:
        return not (await world.kube.list(LEASES, world.namespace)).items

    await eventually("a Lease that the rollout owns", has_lease)
    await world.kube.delete(ROLLOUTS, world.namespace, "demo", uid=made["metadata"]["uid"])
    await eventually("no Lease", has_none, seconds=40)
