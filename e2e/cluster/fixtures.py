"""Pytest fixtures for tests that want the real Kubernetes API; add ``pytest_plugins = ["e2e.cluster.fixtures"]``."""

from collections.abc import Iterator

import pytest

from e2e.cluster.controlplane import ControlPlane, control_plane


@pytest.fixture(scope="session")
def kubernetes_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """One control plane for the whole test session; give each test a namespace of its own."""
    with control_plane(tmp_path_factory.mktemp("controlplane")) as plane:
        yield plane
