"""The operator process: restarts, outages, steady state, and errors at the start."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from e2e.cluster.controlplane import ControlPlane

from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.resources import PODS, ROLLOUTS, SERVICES, STATEFULSETS
from tests.integration.controller.support.operator_process import OperatorProcess, Relay, World, eventually, kubeconfig_through, rollout
from tests.support.ports import free_port

pytestmark = [pytest.mark.controlplane]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_an_operator_restart_changes_no_child(start_operator: Any, world: World, number: signal.Signals) -> None:
    first = start_operator()
    await world.kube.create(rollout("demo", world.namespace))
    await world.serve("demo", 2)
    before = await world.settled("demo")
    status = await world.status("demo")
    code = first.stop(number)
    if number == signal.SIGTERM:
        assert code == 0, first.said()
    second = start_operator()
    await eventually("a reconcile", lambda: _reconciled(second))
    await asyncio.sleep(1.0)
    assert await world.versions("demo") == before
    assert await world.status("demo") == status


async def _reconciled(operator: OperatorProcess) -> bool:
    try:
        return operator.metrics().get('reconcile_total{result="ok"}', 0) >= 1
    except OSError:
        return False


async def test_steady_fleet_causes_no_write(operator: OperatorProcess, world: World) -> None:
    # The API server drops an empty map and replaces an empty string by its default.
    template = {"spec": {"nodeSelector": {}, "schedulerName": ""}}
    await world.kube.create(rollout("demo", world.namespace, podTemplate=template))
    await world.serve("demo", 2)
    versions = await world.settled("demo")
    before = operator.metrics()
    for _ in range(5):
        # Changes of other clients that do not concern the operator.
        for resource, name in ((PODS, "demo-engine-0-0"), (STATEFULSETS, "demo-engine-0")):
            await world.kube.merge_patch(resource, world.namespace, name, {"metadata": {"annotations": {"t": str(time.time())}}})
        await asyncio.sleep(0.5)
    after = operator.metrics()
    assert after['reconcile_total{result="ok"}'] > before['reconcile_total{result="ok"}']
    writes = [key for key in after if key.startswith("writes_total")]
    assert {key: after[key] for key in writes} == {key: before.get(key, 0) for key in writes}
    edited = {("StatefulSet", "demo-engine-0"): ""}
    assert await world.versions("demo") | edited == versions | edited


async def test_operator_survives_an_outage_of_the_api_server(api: ControlPlane, start_operator: Any, world: World, tmp_path: Path) -> None:
    relay = Relay(int(api.url.rsplit(":", 1)[1]))
    await relay.start()
    operator = start_operator(kubeconfig_through(relay, api.kubeconfig, tmp_path / "relayed"))
    await world.kube.create(rollout("demo", world.namespace))
    await eventually("children", lambda: world.is_complete("demo"))
    await relay.stop()
    # Changes during the outage, which no watch reports.
    await world.kube.delete(SERVICES, world.namespace, "demo-router")
    await world.kube.merge_patch(ROLLOUTS, world.namespace, "demo", {"spec": {"replicas": 3}})
    await world.kube.create(rollout("other", world.namespace, replicas=1))
    await asyncio.sleep(6.0)
    assert operator.process.poll() is None, operator.said()
    assert await asyncio.to_thread(operator.health) == 200
    await relay.start()
    began = time.monotonic()
    await eventually("the old rollout is restored", lambda: world.is_complete("demo", 3))
    await eventually("the new rollout is created", lambda: world.is_complete("other", 1))
    print(f"recovered {time.monotonic() - began:.1f} s after the API server")
    assert operator.said().count("ERROR") == 0, operator.said()
    await relay.stop()


async def test_operator_watches_all_namespaces(api: ControlPlane, kube: Kube, namespace: str, tmp_path: Path) -> None:
    operator = OperatorProcess(api.kubeconfig, [], tmp_path / "operator.log")
    operator.start()
    try:
        world = World(kube, namespace)
        await kube.create(rollout("demo", namespace))
        await eventually("children", lambda: world.is_complete("demo"))
    finally:
        code = operator.stop()
    assert code == 0, operator.said()
    assert "Handler" not in operator.said()


async def test_occupied_port_is_reported(api: ControlPlane, namespace: str, tmp_path: Path) -> None:
    server = await asyncio.start_server(lambda _r, _w: None, None, free_port())
    port = server.sockets[0].getsockname()[1]
    operator = OperatorProcess(api.kubeconfig, [namespace], tmp_path / "operator.log", health_port=port)
    operator.start()
    assert operator.process is not None
    assert await asyncio.to_thread(operator.process.wait, 15) == 1
    assert f"port {port} for health cannot be used" in operator.said()
    server.close()


async def test_missing_crd_is_reported(api: ControlPlane, namespace: str, tmp_path: Path) -> None:
    """Use a scripted server, because removing the CRD from the shared API server would remove all rollouts."""
    config = yaml.safe_load(api.kubeconfig.read_text())

    async def missing(_: web.Request) -> web.Response:
        return web.json_response({"kind": "Status", "code": 404, "message": "not found"}, status=404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", missing)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    for cluster in config["clusters"]:
        cluster["cluster"] = {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))
    operator = OperatorProcess(kubeconfig, [namespace], tmp_path / "operator.log")
    operator.start()
    assert operator.process is not None
    assert await asyncio.to_thread(operator.process.wait, 30) == 1
    assert "sglangrollouts (rollout.sglang.io/v1alpha1) is not installed" in operator.said()
    assert "Traceback" not in operator.said()
    await runner.cleanup()
