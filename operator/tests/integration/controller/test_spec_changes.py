"""Scaling, rolling updates and specs that cannot be applied, on a real API server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from e2e.cluster.controlplane import ControlPlane

from sglang_rollout.controller.render import names
from sglang_rollout.kube.resources import CONFIGMAPS, EVENTS, PODS, ROLLOUTS
from tests.integration.controller.support.operator_process import OperatorProcess, World, eventually, rollout

pytestmark = [pytest.mark.controlplane]


async def test_scaling_adds_and_removes_engines(operator: OperatorProcess, world: World) -> None:
    await world.kube.create(rollout("demo", world.namespace, replicas=1))
    await eventually("one engine", lambda: world.is_complete("demo", 1))
    scale = {"spec": {"replicas": 3}}
    await world.kube.merge_patch(ROLLOUTS, world.namespace, "demo", scale, subresource="scale")
    await eventually("three engines", lambda: world.is_complete("demo", 3))
    await world.kube.merge_patch(ROLLOUTS, world.namespace, "demo", {"spec": {"replicas": 1}})

    async def one_left() -> bool:
        left = {name for kind, name in await world.children("demo") if kind == "StatefulSet"}
        return left == {"demo-engine-0"} and len(await world.pods("demo")) == 1

    await eventually("one engine again", one_left)
    intent = await world.kube.get(CONFIGMAPS, world.namespace, "demo-intent")
    assert "demo-engine-1" not in intent["data"][names.INTENT_KEY]
    assert operator.health() == 200


async def test_rolling_update_restarts_one_engine_at_a_time(operator: OperatorProcess, world: World) -> None:
    await world.kube.create(rollout("demo", world.namespace, replicas=3))
    await world.serve("demo", 3)
    old = {name: pod["metadata"]["uid"] for name, pod in (await world.pods("demo")).items()}
    await world.kube.merge_patch(ROLLOUTS, world.namespace, "demo", {"spec": {"engine": {"args": ["--log-level", "info"]}}})
    order: list[str] = []

    async def step() -> bool:
        pods = await world.pods("demo")
        fresh = [name for name in sorted(old) if name not in pods or pods[name]["metadata"]["uid"] != old[name]]
        # One engine at a time: the next one goes only when we, the kubelet, have called the last one ready.
        assert len(set(fresh) - set(order)) <= 1, f"{fresh} are away at once, ready before: {order}"
        for name in set(fresh) - set(order):
            if name in pods:
                # Long enough for an operator that does not wait to give itself away.
                await asyncio.sleep(1.0)
                again = await world.pods("demo")
                assert [
                    other for other in old if other not in order and other != name and again[other]["metadata"]["uid"] != old[other]
                ] == []
                order.append(name)
                await world.make_ready(pods[name])
        return len(order) == 3

    try:
        end = time.monotonic() + 60
        while not await step():
            assert time.monotonic() < end, f"rolled so far: {order}; {await world.status('demo')}"
            await asyncio.sleep(0.1)
    finally:
        print(operator.said())
    assert order == ["demo-engine-2-0", "demo-engine-1-0", "demo-engine-0-0"]
    await eventually("Ready again", lambda: _is_ready(world, "demo"))
    assert (await world.status("demo"))["updatedReplicas"] == 3
    reasons = {
        event["reason"] for event in (await world.kube.list(EVENTS, world.namespace)).items if event["involvedObject"]["name"] == "demo"
    }
    assert {"RollingUpdateStarted", "RollingUpdateFinished"} <= reasons


@pytest.mark.parametrize("pod_spec", [{"nodeSelector": {}, "schedulerName": ""}, {"serviceAccount": "other"}], ids=["dropped", "rewritten"])
async def test_defaulting_of_a_template_does_not_block_a_rolling_update(
    operator: OperatorProcess, world: World, pod_spec: dict[str, Any]
) -> None:
    await world.kube.create(rollout("demo", world.namespace, podTemplate={"spec": pod_spec}))
    await world.serve("demo", 2)
    old = {pod["metadata"]["uid"] for pod in (await world.pods("demo")).values()}
    await world.kube.merge_patch(ROLLOUTS, world.namespace, "demo", {"spec": {"engine": {"args": ["--log-level", "info"]}}})

    async def rolled() -> bool:
        pods = await world.pods("demo")
        for pod in pods.values():
            await world.make_ready(pod)
        return len(pods) == 2 and not old & {pod["metadata"]["uid"] for pod in pods.values()}

    await eventually("two new pods", rolled, seconds=60)
    await eventually("Ready again", lambda: _is_ready(world, "demo"))
    assert (await world.status("demo"))["updatedReplicas"] == 2


async def _is_ready(world: World, name: str) -> bool:
    return (await world.condition(name)).get("status") == "True"


async def test_refusal_is_reported_and_retried_with_growing_delays(operator: OperatorProcess, world: World) -> None:
    template = {"spec": {"nodeSelector": {"not a label!": "x"}}}
    await world.kube.create(rollout("demo", world.namespace, podTemplate=template))

    async def said() -> bool:
        ready = await world.condition("demo")
        assert ready.get("reason") == "ApplyFailed", ready
        return "not a label!" in ready["message"]

    await eventually("the server's sentence in the status", said)
    assert await world.is_degraded("demo", "ApplyFailed")
    before = operator.metrics()['api_requests_total{outcome="error",verb="apply"}']
    await asyncio.sleep(5.0)
    tries = operator.metrics()['api_requests_total{outcome="error",verb="apply"}'] - before
    assert tries <= 20, "a hot loop"
    await world.kube.merge_patch(ROLLOUTS, world.namespace, "demo", {"spec": {"podTemplate": {"spec": {"nodeSelector": None}}}})
    await eventually("children after the mend", lambda: world.is_complete("demo"))


MISFITS: dict[str, tuple[Any, str]] = {
    "unknown field": ({"containers": [{"name": "engine", "enviroment": []}]}, "enviroment: field not declared in schema"),
    "wrong type": ({"terminationGracePeriodSeconds": "soon"}, "terminationGracePeriodSeconds"),
    "duplicate key": ({"tolerations": [], "hostAliases": [{"ip": "10.0.0.1"}, {"ip": "10.0.0.1"}]}, "hostAliases"),
    "bad quantity": ({"containers": [{"name": "engine", "resources": {"requests": {"memory": "much"}}}]}, "quantities must match"),
}


@pytest.mark.parametrize("case", MISFITS)
async def test_schema_violation_is_a_refusal_and_not_an_outage(operator: OperatorProcess, world: World, case: str) -> None:
    """The API server answers 500 to such an apply, as it does when it fails itself."""
    pod_spec, words = MISFITS[case]
    await world.kube.create(rollout("demo", world.namespace, podTemplate={"spec": pod_spec}))

    async def said() -> bool:
        ready = await world.condition("demo")
        assert (ready.get("status"), ready.get("reason")) == ("False", "ApplyFailed"), ready
        return words in ready["message"]

    await eventually("the server's words in the status", said)
    assert await world.is_degraded("demo", "ApplyFailed")
    assert "waiting for the API server" not in operator.said()
    # An outage is retried every three seconds, a refusal with growing delays.
    assert operator.metrics()['reconcile_total{result="unavailable"}'] == 0
    await world.kube.merge_patch(ROLLOUTS, world.namespace, "demo", {"spec": {"podTemplate": None}})
    await eventually("children after the mend", lambda: world.is_complete("demo"))
    assert (await world.condition("demo"))["reason"] != "ApplyFailed"


async def test_refused_delete_is_reported(api: ControlPlane, operator: OperatorProcess, world: World) -> None:
    await world.kube.create(rollout("demo", world.namespace, replicas=2))
    await eventually("children", lambda: world.is_complete("demo"))
    _refuse_deletes(api, world.namespace)

    async def refused() -> bool:
        await world.kube.merge_patch(ROLLOUTS, world.namespace, "demo", {"spec": {"replicas": 1}})
        ready = await world.condition("demo")
        assert ready.get("reason") == "ApplyFailed", ready
        return "no change on a Friday" in ready["message"]

    await eventually("the policy's words in the status", refused)
    api.kubectl("delete", "validatingadmissionpolicybinding", world.namespace)
    await eventually("one engine after the mend", lambda: world.is_complete("demo", 1), seconds=60)


def _refuse_deletes(api: ControlPlane, namespace: str) -> None:
    """Create an admission policy for the namespace, and wait until it is in effect."""
    policy = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": namespace},
        "spec": {
            "matchConstraints": {
                "resourceRules": [{"apiGroups": ["apps"], "apiVersions": ["v1"], "resources": ["statefulsets"], "operations": ["DELETE"]}]
            },
            "validations": [{"expression": "false", "message": "no change on a Friday"}],
        },
    }
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": namespace},
        "spec": {
            "policyName": namespace,
            "validationActions": ["Deny"],
            "matchResources": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}},
        },
    }
    for made in (policy, binding):
        api.kubectl("apply", "-f", "-", stdin=json.dumps(made))
    end = time.monotonic() + 30
    while "Friday" not in api.kubectl("delete", "statefulset", "demo-engine-1", "-n", namespace, "--dry-run=server", check=False).stderr:
        assert time.monotonic() < end, "the policy is not looked at"
        time.sleep(0.5)


async def test_image_pull_failure_is_reported_with_an_event(operator: OperatorProcess, world: World) -> None:
    await world.kube.create(rollout("demo", world.namespace))
    await eventually("children", lambda: world.is_complete("demo"))
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "img:1": not found'}
    container = {
        "name": "engine",
        "image": "img:1",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {"waiting": waiting},
    }
    status = {"phase": "Pending", "containerStatuses": [container]}
    await world.kube.merge_patch(PODS, world.namespace, "demo-engine-1-0", {"status": status}, subresource="status")

    async def said() -> bool:
        rows = {row["name"]: row for row in (await world.status("demo"))["engines"]}
        assert "img:1" in rows["demo-engine-1"].get("message", ""), rows
        return bool(rows["demo-engine-1"]["phase"] == "Failed")

    await eventually("the reason in the status", said)

    async def noted() -> bool:
        return any(
            event["type"] == "Warning" and "demo-engine-1" in event["message"]
            for event in (await world.kube.list(EVENTS, world.namespace)).items
            if event["involvedObject"]["name"] == "demo"
        )

    await eventually("a Warning", noted)
    assert "EngineFailed" in operator.said()


async def test_invalid_spec_changes_no_child(api: ControlPlane, operator: OperatorProcess, world: World) -> None:
    """The object was stored before a rule existed: the test removes the schema for a moment."""
    await world.kube.create(rollout("demo", world.namespace))
    await eventually("children", lambda: world.is_complete("demo"))
    before = await world.settled("demo")
    with without_schema(api):
        await world.kube.merge_patch(ROLLOUTS, world.namespace, "demo", {"spec": {"model": None}})
    await eventually("InvalidSpec", lambda: _has_reason(world, "InvalidSpec"))
    ready = await world.condition("demo")
    assert ready["status"] == "False"
    assert "model" in ready["message"]
    await asyncio.sleep(1.0)
    assert await world.versions("demo") == before
    assert "Traceback" not in operator.said()
    await world.kube.merge_patch(ROLLOUTS, world.namespace, "demo", {"spec": {"model": {"path": "tiny"}, "replicas": 1}})
    await eventually("mended", lambda: world.is_complete("demo", 1))


async def _has_reason(world: World, reason: str) -> bool:
    ready = await world.condition("demo")
    assert ready.get("reason") == reason, ready
    return True


@contextmanager
def without_schema(api: ControlPlane) -> Iterator[None]:
    """Let the API server accept any spec while the block runs."""
    crd = api.get("crd", "sglangrollouts.rollout.sglang.io")
    (version,) = crd["spec"]["versions"]
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    loose = {"type": "object", "properties": {"spec": anything, "status": anything}}
    _replace_schema(api, loose)
    try:
        yield
    finally:
        _replace_schema(api, version["schema"]["openAPIV3Schema"])


def _replace_schema(api: ControlPlane, schema: Any) -> None:
    patch = [{"op": "replace", "path": "/spec/versions/0/schema/openAPIV3Schema", "value": schema}]
    api.kubectl("patch", "crd", "sglangrollouts.rollout.sglang.io", "--type=json", "--patch-file=/dev/stdin", stdin=json.dumps(patch))
    # The server takes a moment to serve another schema, and says nowhere when it does.
    time.sleep(2.0)


async def test_rollout_restart_of_a_child_restarts_its_pods(api: ControlPlane, operator: OperatorProcess, world: World) -> None:
    await world.kube.create(rollout("demo", world.namespace))
    await world.serve("demo", 2)
    old = {
        name: pod["metadata"]["uid"] for component in ("engine", "router") for name, pod in (await world.pods("demo", component)).items()
    }
    targets = ("sts/demo-engine-0", "sts/demo-engine-1", "deploy/demo-router")
    api.kubectl("rollout", "restart", *targets, "-n", world.namespace)

    async def are_new() -> bool:
        pods = {**await world.pods("demo"), **await world.pods("demo", "router")}
        for pod in pods.values():
            await world.make_ready(pod)
        return len(pods) == 3 and not {pod["metadata"]["uid"] for pod in pods.values()} & set(old.values())

    await eventually("new pods of engines and router", are_new)
    await eventually("Ready again", lambda: _is_ready(world, "demo"))
    await world.settled("demo")
    assert operator.said().count("another client changed it") == 0, "the restart is no drift"
