"""Children on a real API server with its controllers. Kubelet and coordinator are stand-ins."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from sglang_rollout.controller.render import names
from sglang_rollout.controller.triggers import list_watched_kinds
from sglang_rollout.credentials import Credentials
from sglang_rollout.kube.resources import (
    CONFIGMAPS,
    DEPLOYMENTS,
    NETWORK_POLICIES,
    ROLEBINDINGS,
    ROLES,
    ROLLOUTS,
    SECRETS,
    SERVICEACCOUNTS,
    SERVICES,
    STATEFULSETS,
    Resource,
    resource_of,
)
from tests.integration.controller.support.operator_process import OperatorProcess, World, eventually, expected, rollout

pytestmark = [pytest.mark.controlplane]


async def test_rollout_owns_all_its_children(operator: OperatorProcess, world: World) -> None:
    created = await world.kube.create(rollout("demo", world.namespace))
    await eventually("children", lambda: world.is_complete("demo"))
    children = await world.children("demo")
    assert set(children) == expected("demo", 2)
    for key, child in children.items():
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("SGLangRollout", "demo", created["metadata"]["uid"]), key
        assert owner["controller"] is True
    assert len(children["Secret", "demo-control"]["data"]["token"]) >= 32
    live = await world.kube.get(ROLLOUTS, world.namespace, "demo")
    assert "annotations" not in live["metadata"]
    assert "finalizers" not in live["metadata"]
    status = live["status"]
    assert status["observedGeneration"] == live["metadata"]["generation"]
    ready = await world.condition("demo")
    assert ready["status"] == "False"
    assert ready["message"].endswith(".")
    assert operator.health() == 200
    assert operator.metrics()['writes_total{verb="apply"}'] >= len(children) - 1
    await world.settled("demo")
    for key, child in (await world.children("demo")).items():
        written = {entry["operation"] for entry in child["metadata"]["managedFields"] if entry["manager"] == names.FIELD_MANAGER}
        # The Secret of the key is created before it is applied, so that the key is never replaced; an account, so that it is no other's.
        assert written == ({"Update", "Apply"} if key == ("Secret", "demo-control") or key[0] == "ServiceAccount" else {"Apply"}), key


async def test_an_engine_mounts_its_own_credential_which_follows_the_key(operator: OperatorProcess, world: World) -> None:
    await world.kube.create(rollout("demo", world.namespace))
    await eventually("children", lambda: world.is_complete("demo"))
    for name, pod in (await world.pods("demo")).items():
        (volume,) = (volume["secret"] for volume in pod["spec"]["volumes"] if "secret" in volume)
        assert (volume["secretName"], volume["items"]) == ("demo-credentials", [{"key": name.removesuffix("-0"), "path": "token"}])
    await world.kube.merge_patch(SECRETS, world.namespace, "demo-control", {"stringData": {"token": "new\nold"}})
    await world.wake("demo")
    key = Credentials("new", "old")

    async def follows() -> bool:
        data = (await world.kube.get(SECRETS, world.namespace, "demo-credentials"))["data"]
        return {name: tuple(base64.b64decode(text).decode().split()) for name, text in data.items()} == {
            name: key.derive(name).lines() for name in ("demo-engine-0", "demo-engine-1")
        }

    await eventually("credentials of the new key", follows, seconds=10)
    await world.settled("demo")


DRIFT: list[tuple[Resource, str, dict[str, Any]]] = [
    (SERVICEACCOUNTS, "demo-engine", {"automountServiceAccountToken": True}),
    (SERVICEACCOUNTS, "demo-router", {"metadata": {"labels": {names.LABEL_COMPONENT: "x"}}}),
    (ROLES, "demo-router", {"rules": []}),
    (ROLEBINDINGS, "demo-router", {"subjects": []}),
    (NETWORK_POLICIES, "demo-router", {"spec": {"ingress": [{}]}}),
    (NETWORK_POLICIES, "demo-engines", {"spec": {"podSelector": {"matchLabels": {names.LABEL_ROLLOUT: "x"}}}}),
    (SECRETS, "demo-control", {"metadata": {"labels": {names.LABEL_ROLLOUT: None}}}),
    (SECRETS, "demo-credentials", {"data": {"demo-engine-0": "eA=="}}),
    (CONFIGMAPS, "demo-intent", {"data": {"intent.json": "{}"}}),
    (CONFIGMAPS, "demo-weights", {"metadata": {"labels": {"app.kubernetes.io/managed-by": "me"}}}),
    (SERVICES, "demo-engines", {"spec": {"publishNotReadyAddresses": False}}),
    (SERVICES, "demo-router", {"spec": {"selector": {names.LABEL_COMPONENT: "x"}}}),
    (SERVICES, "demo-generate", {"spec": {"selector": {names.LABEL_COMPONENT: "x"}}}),
    (DEPLOYMENTS, "demo-router", {"spec": {"replicas": 5}}),
    (STATEFULSETS, "demo-engine-1", {"spec": {"replicas": 0}}),
]


def rendered(obj: dict[str, Any], changed: dict[str, Any]) -> Any:
    """Return the parts of an object that ``changed`` names."""
    return {key: rendered(obj.get(key, {}), value) if isinstance(value, dict) else obj.get(key) for key, value in changed.items()}


async def test_changed_child_is_restored(operator: OperatorProcess, world: World) -> None:
    await world.kube.create(rollout("demo", world.namespace))
    await eventually("children", lambda: world.is_complete("demo"))
    before = await world.children("demo")
    for resource, name, change in DRIFT:
        await world.kube.merge_patch(resource, world.namespace, name, change)
        if resource is SECRETS:
            await world.wake("demo")

        async def healed(resource: Resource = resource, name: str = name, change: dict[str, Any] = change) -> bool:
            live = await world.kube.get(resource, world.namespace, name)
            return bool(rendered(live, change) == rendered(before[resource.kind, name], change))

        await eventually(f"{resource.kind} {name} as rendered", healed, seconds=10)
    # Also the Secret that lost its label, and with it was invisible for a moment, kept its token.
    token = (await world.kube.get(SECRETS, world.namespace, "demo-control"))["data"]
    assert token == before["Secret", "demo-control"]["data"]
    assert operator.health() == 200


async def test_deleted_child_is_recreated(operator: OperatorProcess, world: World) -> None:
    await world.kube.create(rollout("demo", world.namespace))
    await eventually("children", lambda: world.is_complete("demo"))
    before = await world.children("demo")
    for (kind, name), child in before.items():
        resource = resource_of(child)
        await world.kube.delete(resource, world.namespace, name)
        if resource is SECRETS:
            await world.wake("demo")

        async def back(resource: Resource = resource, name: str = name, old: str = child["metadata"]["uid"]) -> bool:
            live = await world.kube.get(resource, world.namespace, name)
            return bool(live["metadata"]["uid"] != old and not live["metadata"].get("deletionTimestamp"))

        await eventually(f"{kind} {name} back", back, seconds=15)
    await eventually("children", lambda: world.is_complete("demo"))
    assert operator.health() == 200


async def test_coordinator_record_is_never_overwritten(operator: OperatorProcess, world: World) -> None:
    await world.kube.create(rollout("demo", world.namespace))
    await eventually("children", lambda: world.is_complete("demo"))
    await world.record("demo", ["demo-engine-0"])
    await world.kube.merge_patch(CONFIGMAPS, world.namespace, "demo-weights", {"metadata": {"labels": {"app.kubernetes.io/name": "x"}}})

    async def healed() -> bool:
        live = await world.kube.get(CONFIGMAPS, world.namespace, "demo-weights")
        assert live["data"][names.WEIGHTS_KEY]
        return bool(live["metadata"]["labels"]["app.kubernetes.io/name"] == "sglang-rollout")

    await eventually("label healed", healed)
    assert operator.health() == 200


async def test_foreign_objects_are_left_alone(operator: OperatorProcess, world: World) -> None:
    stranger = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "theirs", "namespace": world.namespace, "labels": {names.LABEL_ROLLOUT: "demo"}},
    }
    await world.kube.create(stranger)
    await world.kube.create(rollout("demo", world.namespace))
    await eventually("children", lambda: world.is_complete("demo"))
    assert not await world.gone(CONFIGMAPS, "theirs")
    assert operator.health() == 200


async def test_foreign_object_with_the_name_of_a_child_is_left_alone(operator: OperatorProcess, world: World) -> None:
    theirs: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "demo-router", "namespace": world.namespace},
            "spec": {"selector": {"app": "theirs"}, "ports": [{"port": 80}]},
        },
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "demo-engine", "namespace": world.namespace}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "demo-control", "namespace": world.namespace}},
    ]
    before = [(await world.kube.create(obj))["metadata"]["resourceVersion"] for obj in theirs]
    await world.kube.create(rollout("demo", world.namespace))

    async def said() -> str:
        ready = await world.condition("demo")
        assert (ready.get("status"), ready.get("reason")) == ("False", "NameTaken"), ready
        return str(ready["message"])

    assert (await eventually("NameTaken", said)).startswith("ServiceAccount demo-engine exists and does not belong to this rollout")
    assert await world.is_degraded("demo", "NameTaken")
    await asyncio.sleep(2.0)
    live = [await world.kube.get(resource_of(obj), world.namespace, obj["metadata"]["name"]) for obj in theirs]
    assert [obj["metadata"]["resourceVersion"] for obj in live] == before, "not written to"
    assert not await world.children("demo"), "nothing else is created: pods would use these objects"
    # The first way out: it goes. The second: it is handed over.
    await world.kube.delete(SERVICES, world.namespace, "demo-router")
    for resource, name in ((SERVICEACCOUNTS, "demo-engine"), (SECRETS, "demo-control")):
        await world.kube.merge_patch(resource, world.namespace, name, {"metadata": {"labels": {names.LABEL_ROLLOUT: "demo"}}})
    await eventually("children", lambda: world.is_complete("demo"))

    async def other() -> bool:
        return bool((await world.condition("demo"))["reason"] != "NameTaken")

    await eventually("another reason", other)
    assert (await world.kube.get(SECRETS, world.namespace, "demo-control"))["data"]["token"]


PARTS: dict[str, dict[str, Any]] = {
    "ServiceAccount": {},
    "Role": {"rules": []},
    "RoleBinding": {"roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"}, "subjects": []},
    "Secret": {},
    "ConfigMap": {},
    "Service": {"spec": {"selector": {"app": "theirs"}, "ports": [{"port": 80}]}},
    "NetworkPolicy": {"spec": {"podSelector": {"matchLabels": {"app": "theirs"}}}},
}
"""Least content of an object of each kind that the pods of a rollout use by its name."""


async def test_no_pod_uses_an_object_of_another_owner(operator: OperatorProcess, world: World) -> None:
    """Any object that has the name of a child, whatever its kind."""
    rbac = "rbac.authorization.k8s.io/v1"
    versions = {"Role": rbac, "RoleBinding": rbac, "NetworkPolicy": "networking.k8s.io/v1"}
    kinds = [kind for kind, _ in sorted(expected("demo", 2)) if kind in PARTS]
    assert set(kinds) == set(PARTS)
    for index in range(len(kinds)):
        # A rollout of its own for each object: children of a deleted one live until the garbage collector has found them.
        owner = f"demo-{index}"
        kind, name = [child for child in sorted(expected(owner, 2)) if child[0] in PARTS][index]
        metadata = {"name": name, "namespace": world.namespace}
        theirs = await world.kube.create({"apiVersion": versions.get(kind, "v1"), "kind": kind, "metadata": metadata, **PARTS[kind]})
        await world.kube.create(rollout(owner, world.namespace))

        async def is_reported(owner: str = owner, kind: str = kind, name: str = name) -> bool:
            ready = await world.condition(owner)
            return ready.get("reason") == "NameTaken" and f"{kind} {name} exists" in ready["message"]

        await eventually(f"NameTaken for {kind} {name}", is_reported)
        assert not await world.children(owner)
        assert not await world.pods(owner)
        live = await world.kube.get(resource_of(theirs), world.namespace, name)
        assert live["metadata"]["resourceVersion"] == theirs["metadata"]["resourceVersion"]
    assert operator.health() == 200


async def test_a_running_fleet_is_not_changed_to_use_an_account_of_another_owner(operator: OperatorProcess, world: World) -> None:
    await world.kube.create(rollout("demo", world.namespace))
    await world.serve("demo", 2)
    await world.settled("demo")
    operator.stop()
    await world.kube.delete(SERVICEACCOUNTS, world.namespace, "demo-engine")
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "demo-engine", "namespace": world.namespace}}
    await world.kube.create(account)
    more = {"spec": {"replicas": 3, "podTemplate": {"spec": {"automountServiceAccountToken": True}}}}
    await world.kube.merge_patch(ROLLOUTS, world.namespace, "demo", more)
    before = {key: child.get("spec") for key, child in (await world.children("demo")).items()}
    operator.start()

    async def is_reported() -> bool:
        return (await world.condition("demo")).get("reason") == "NameTaken"

    await eventually("NameTaken", is_reported)
    await asyncio.sleep(1.0)
    live = {key: child.get("spec") for key, child in (await world.children("demo")).items()}
    assert live == before, "no third engine, and none with a token"
    assert "labels" not in (await world.kube.get(SERVICEACCOUNTS, world.namespace, "demo-engine"))["metadata"]


async def test_deleted_rollout_removes_its_children(operator: OperatorProcess, world: World) -> None:
    await world.kube.create(rollout("demo", world.namespace))
    await eventually("children", lambda: world.is_complete("demo"))
    await world.kube.delete(ROLLOUTS, world.namespace, "demo")

    async def empty() -> bool:
        return not await world.children("demo") and not await world.pods("demo")

    await eventually("no children", empty)
    await asyncio.sleep(1.0)
    assert await empty()
    assert "Traceback" not in operator.said()
    # And again under the same name, at once.
    await world.kube.create(rollout("demo", world.namespace))
    await eventually("children of the new one", lambda: world.is_complete("demo"))


def test_every_rendered_kind_except_secrets_is_watched() -> None:
    watched = {key[-1] for key in list_watched_kinds()}
    assert watched == {resource.plural for resource in names.CHILD_KINDS} - {"secrets"} | {"pods"}
