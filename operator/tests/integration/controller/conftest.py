"""A namespace per test on a real API server, and operators that watch it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from e2e.cluster.controlplane import ControlPlane
from e2e.cluster.fixtures import kubernetes_api  # noqa: F401 - a fixture

from sglang_rollout.kube.client import Kube
from tests.integration.controller.support.chart import InstallChart, Release
from tests.integration.controller.support.operator_process import OperatorProcess, World, eventually
from tests.support.paths import REPOSITORY

CRDS = REPOSITORY / "crds"

StartOperator = Callable[..., OperatorProcess]


@pytest.fixture(scope="session")
def api(kubernetes_api: ControlPlane) -> ControlPlane:  # noqa: F811
    """Return an API server with the CRD."""
    kubernetes_api.kubectl("apply", "--server-side", "-f", str(CRDS))
    kubernetes_api.wait_for_crd("sglangrollouts.rollout.sglang.io")
    return kubernetes_api


@pytest.fixture
def namespace(api: ControlPlane) -> str:
    name = f"t-{uuid.uuid4().hex[:8]}"
    api.kubectl("create", "namespace", name)
    return name


@pytest.fixture
async def kube(api: ControlPlane) -> AsyncIterator[Kube]:
    async with await Kube.connect(field_manager="the-test", kubeconfig=str(api.kubeconfig)) as kube:
        yield kube


@pytest.fixture
def world(kube: Kube, namespace: str) -> World:
    return World(kube, namespace)


@pytest.fixture
def start_operator(api: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[StartOperator]:
    """Return a function that starts operators for the namespace of the test. They end with the test."""
    started: list[OperatorProcess] = []

    def start(kubeconfig: Path | None = None) -> OperatorProcess:
        operator = OperatorProcess(kubeconfig or api.kubeconfig, [namespace], tmp_path / f"operator-{len(started)}.log")
        started.append(operator)
        operator.start()
        return operator

    yield start
    for operator in started:
        if operator.process is not None and operator.process.poll() is None:
            operator.stop(9)


@pytest.fixture
def install_chart(api: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[InstallChart]:
    """Return a function that applies the chart with values of the form ``path=JSON``. Its objects are deleted with the test."""
    installed: list[Release] = []

    def install(*values: str) -> Release:
        installed.append(Release(api, namespace, tmp_path, *values))
        return installed[-1]

    yield install
    for release in installed:
        if release.operator.process is not None and release.operator.process.poll() is None:
            release.operator.stop(9)
        if release.operator.process is not None:
            print(release.operator.said())
        release.delete()


@pytest.fixture
def operator(start_operator: StartOperator) -> OperatorProcess:
    return start_operator()


__all__ = ["eventually"]
