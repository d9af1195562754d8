"""Pytest fixtures for tests that need the real Kubernetes API. Add ``pytest_plugins = ["e2e.cluster.fixtures"]``."""

from collections.abc import Iterator

import pytest

from e2e.cluster.controlplane import ControlPlane, control_plane


@pytest.fixture(scope="session")
def kubernetes_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """Run one control plane for the test session. Each test needs its own namespace."""
    with control_plane(tmp_path_factory.mktemp("controlplane")) as plane:
        yield plane
