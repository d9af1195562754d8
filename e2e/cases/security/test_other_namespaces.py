"""Callers of other namespaces are refused until an administrator lets the coordinator see their pods."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.cases.security.callers import ELSEWHERE, change_security, reach
from e2e.cases.stand_in_rollout import StandInRollout
from e2e.kube import Kubectl, eventually
from sglang_rollout.wire.ports import FRONT_PORT

BINDING = "callers-of-stand"
ROLE = "sglang-rollout-operator-callers"


@pytest.fixture
def binding(kubectl: Kubectl) -> Iterator[str]:
    """Return the name of a ClusterRoleBinding that the case may create."""
    kubectl("delete", "clusterrolebinding", BINDING, "--ignore-not-found")
    yield BINDING
    kubectl("delete", "clusterrolebinding", BINDING, "--ignore-not-found")


def test_callers_of_another_namespace_need_a_right_that_the_operator_cannot_grant(
    stand: StandInRollout, outsider: str, binding: str
) -> None:
    kubectl, url = stand.kubectl, f"http://{stand.name}-router.{stand.kubectl.namespace}:{FRONT_PORT}/fleet"

    def outsider_gets(status: int) -> bool:
        return reach(ELSEWHERE, outsider, url, seconds=20) == [status]

    change_security(kubectl, stand.name, trainers={"serviceAccounts": ["default", f"{ELSEWHERE.namespace}/default"]})
    try:
        eventually("the condition is NotAllowed", lambda: stand.condition("Degraded")["reason"] == "NotAllowed", within=60, every=1)
        assert reach(kubectl, "trainer", url, container="trainer", seconds=20) == [200]
        assert outsider_gets(403)
        account = f"{kubectl.namespace}:{stand.name}-router"
        kubectl("create", "clusterrolebinding", binding, f"--clusterrole={ROLE}", f"--serviceaccount={account}")
        eventually("the outsider is a trainer", lambda: outsider_gets(200), within=60, every=1)
        eventually("nothing needs attention", lambda: stand.condition("Degraded")["reason"] == "AsExpected", within=60, every=1)
    finally:
        change_security(kubectl, stand.name)
    eventually("the outsider is refused", lambda: outsider_gets(403), within=60, every=1)
