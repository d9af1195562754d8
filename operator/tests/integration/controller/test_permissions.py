"""Operator and coordinator need no more than their RBAC rules."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from e2e.cluster.controlplane import ControlPlane

from sglang_rollout.controller.render import names
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import KubeError, Refused
from sglang_rollout.kube.resources import CONFIGMAPS, ENDPOINTSLICES, PODS, ROLLOUTS, SECRETS, STATEFULSETS, Object, resource_of
from sglang_rollout.kube.watch import follow
from tests.integration.controller.support.chart import InstallChart, kubeconfig_of
from tests.integration.controller.support.operator_process import OperatorProcess, Relay, World, eventually, kubeconfig_through, rollout

pytestmark = [pytest.mark.controlplane]


async def test_operator_works_with_the_rights_of_the_chart(install_chart: InstallChart, world: World) -> None:
    operator = install_chart().operator
    operator.start()
    try:
        await world.kube.create(rollout("demo", world.namespace))
        await world.serve("demo", 2)
        for name, child in (await world.children("demo")).items():
            if name[0] in ("Role", "RoleBinding", "StatefulSet"):
                await world.kube.merge_patch(
                    resource_of(child), world.namespace, name[1], {"metadata": {"labels": {names.LABEL_ROLLOUT: None}}}
                )
        await eventually("children", lambda: world.is_complete("demo"))
        engine = {"spec": {"replicas": 1, "engine": {"args": ["--log-level", "info"]}}}
        old = (await world.pods("demo"))["demo-engine-0-0"]["metadata"]["uid"]
        await world.kube.merge_patch(ROLLOUTS, world.namespace, "demo", engine)

        async def rolled() -> bool:
            left = [name for kind, name in await world.children("demo") if kind == "StatefulSet"]
            pod = await world.kube.get(PODS, world.namespace, "demo-engine-0-0")
            return left == ["demo-engine-0"] and bool(pod["metadata"]["uid"] != old)

        await eventually("scaled down and rolled", rolled)
    finally:
        operator.stop()
    said = operator.said()
    assert "orbidden" not in said, said
    assert "ERROR" not in said, said


async def test_coordinator_may_read_its_intent_and_write_only_its_record(
    api: ControlPlane, operator: OperatorProcess, world: World, tmp_path: Path
) -> None:
    await world.kube.create(rollout("demo", world.namespace))
    await eventually("children", lambda: world.is_complete("demo"))
    relay = Relay(int(api.url.rsplit(":", 1)[1]))
    await relay.start()
    own = kubeconfig_of(api, world.namespace, "demo-router", tmp_path / "coordinator")
    config = kubeconfig_through(relay, own, tmp_path / "relayed")
    seen: asyncio.Queue[dict[str, Object]] = asyncio.Queue()
    errors: list[KubeError] = []
    async with await Kube.connect(field_manager="coordinator", kubeconfig=str(config)) as kube:

        async def read() -> None:
            intent = names.intent_name("demo")
            async for objects in follow(kube, CONFIGMAPS, world.namespace, name=intent, on_error=errors.append):
                seen.put_nowait(objects)

        reading = asyncio.create_task(read())
        assert '"demo-engine-1"' in (await asyncio.wait_for(seen.get(), 10))["demo-intent"]["data"][names.INTENT_KEY]
        await world.kube.merge_patch(ROLLOUTS, world.namespace, "demo", {"spec": {"replicas": 1}})
        assert '"demo-engine-1"' not in (await asyncio.wait_for(seen.get(), 10))["demo-intent"]["data"][names.INTENT_KEY]
        await relay.stop()
        await world.kube.merge_patch(ROLLOUTS, world.namespace, "demo", {"spec": {"replicas": 3}})
        await asyncio.sleep(2.0)
        assert errors
        assert seen.empty()
        await relay.start()
        assert '"demo-engine-2"' in (await asyncio.wait_for(seen.get(), 15))["demo-intent"]["data"][names.INTENT_KEY]
        assert (await kube.list(ENDPOINTSLICES, world.namespace)).items
        await kube.merge_patch(CONFIGMAPS, world.namespace, "demo-weights", {"data": {"x": "y"}})
        with pytest.raises(Refused, match="cannot patch resource"):
            await kube.merge_patch(CONFIGMAPS, world.namespace, "demo-intent", {"data": {"x": "y"}})
        for resource, name in ((SECRETS, "demo-control"), (STATEFULSETS, "demo-engine-0")):
            with pytest.raises(Refused, match="cannot get resource"):
                await kube.get(resource, world.namespace, name)
        reading.cancel()
    await relay.stop()
    assert operator.health() == 200
