"""``sglang-rollout status`` against a real API server, with the rights of a user who may view a namespace."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from e2e.cluster.controlplane import ControlPlane

from sglang_rollout.controller.render import names
from sglang_rollout.kube.resources import CONFIGMAPS
from sglang_rollout.wire.record import Record
from sglang_rollout.wire.states import Version
from tests.integration.controller.support.chart import InstallChart, kubeconfig_of
from tests.integration.controller.support.operator_process import World, eventually, rollout

pytestmark = [pytest.mark.controlplane]


async def run_status(*arguments: str) -> tuple[int, str]:
    """Run the command; return its exit code and what it printed."""
    command = [sys.executable, "-m", "sglang_rollout.cli", "status", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    async with asyncio.timeout(60):
        output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


def make_user(api: ControlPlane, namespace: str, name: str, folder: Path, *rights: str) -> Path:
    """Return the kubeconfig of a user of a namespace: the arguments are those of ``kubectl create role``, or the name of a ClusterRole."""
    api.kubectl("create", "serviceaccount", name, "-n", namespace)
    if len(rights) > 1:
        api.kubectl("create", "role", name, "-n", namespace, *rights)
    role = f"--role={name}" if len(rights) > 1 else f"--clusterrole={rights[0]}"
    api.kubectl("create", "rolebinding", name, "-n", namespace, role, f"--serviceaccount={namespace}:{name}")
    return kubeconfig_of(api, namespace, name, folder / f"{name}.kubeconfig")


async def commit(world: World, label: str) -> None:
    """Play the coordinator: commit a version."""
    found = await world.kube.get(CONFIGMAPS, world.namespace, names.weights_name("demo"))
    record = Record.model_validate_json(found["data"][names.WEIGHTS_KEY])
    committed = Version(run=1, step=record.committed.step + 1, label=label)
    rows = [row.model_copy(update={"version": committed}) for row in record.engines]
    data = {names.WEIGHTS_KEY: record.model_copy(update={"committed": committed, "engines": rows}).model_dump_json()}
    await world.kube.merge_patch(CONFIGMAPS, world.namespace, names.weights_name("demo"), {"data": data})


async def test_viewer_sees_the_fleet_and_follows_a_push(
    api: ControlPlane, install_chart: InstallChart, world: World, tmp_path: Path
) -> None:
    operator = install_chart().operator
    operator.start()
    await world.kube.create(rollout("demo", world.namespace))
    await world.serve("demo", 2)
    config = str(make_user(api, world.namespace, "ann", tmp_path, "view"))
    where = ("-n", world.namespace, "--kubeconfig", config)

    async def is_shown() -> bool:
        """The rights of the ClusterRole view are aggregated a moment after the chart is applied."""
        code, output = await run_status("demo", *where)
        assert code == 0, output
        lines = output.splitlines()
        assert len(lines) <= 30, output
        assert ", 2/2 engines serve" in lines[0], output
        return all(f"demo-engine-{index}  Serving  base" in output for index in range(2)) and "Update    none in progress" in output

    await eventually("the screen", is_shown)
    command = [sys.executable, "-m", "sglang_rollout.cli", "status", "demo", "-w", *where]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            await process.stdout.readuntil(b"demo-engine-1  Serving  base")
            await commit(world, "step-1")
            await process.stdout.readuntil(b"Version   step-1 (run 1, step 1)")
            await process.stdout.readuntil(b"demo-engine-1  Serving  step-1")
    finally:
        process.kill()
        await process.wait()


async def test_user_without_rights_reads_which_right_is_missing(api: ControlPlane, world: World, namespace: str, tmp_path: Path) -> None:
    await world.kube.create(rollout("demo", namespace))
    only_rollouts = make_user(api, namespace, "ben", tmp_path, "--verb=get", "--resource=sglangrollouts.rollout.sglang.io")
    code, output = await run_status("demo", "-n", namespace, "--kubeconfig", str(only_rollouts))
    assert code == 0, output
    assert "No operator has written a status for this rollout yet." in output
    line = " ".join(output.split())
    assert f"Not known: the update in progress. You may not get configmaps demo-weights in namespace {namespace}" in line

    user = make_user(api, namespace, "eve", tmp_path, "--verb=get", "--resource=events")
    code, output = await run_status("demo", "-n", namespace, "--kubeconfig", str(user))
    assert code == 1
    assert output.startswith(f"Error: You may not get sglangrollouts demo in namespace {namespace}: ask for the ClusterRole view there.")


async def test_misspelt_name_gets_the_right_one(api: ControlPlane, world: World, namespace: str) -> None:
    await world.kube.create(rollout("demo", namespace))
    code, output = await run_status("demmo", "-n", namespace, "--kubeconfig", str(api.kubeconfig))
    assert (code, "There are: demo." in output) == (1, True), output
    code, output = await run_status("demo", "-n", "default", "--kubeconfig", str(api.kubeconfig))
    assert (code, namespace in output) == (1, True), output
