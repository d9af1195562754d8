"""Pods that call fleets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.cases.security.callers import ELSEWHERE, caller_pod, wait_for_pods
from e2e.kube import Kubectl, Refused


@pytest.fixture(scope="session")
def outsider(operator: Kubectl) -> Iterator[str]:
    """Create a pod in another namespace, and return its name."""
    try:
        ELSEWHERE("create", "namespace", ELSEWHERE.namespace)
    except Refused as error:
        if "AlreadyExists" not in str(error):
            raise
    ELSEWHERE.apply(caller_pod("outsider"))
    wait_for_pods(ELSEWHERE, "outsider")
    yield "outsider"
    ELSEWHERE("delete", "namespace", ELSEWHERE.namespace, "--wait=false")


@pytest.fixture
def sampler(kubectl: Kubectl) -> Iterator[str]:
    """Create another pod of the namespace, and return its name."""
    kubectl.apply(caller_pod("sampler"))
    wait_for_pods(kubectl, "sampler")
    yield "sampler"
    kubectl("delete", "pod", "sampler")
