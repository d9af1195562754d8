"""The coordinator sends an engine's own credential, and the rollout's key only to pods that mount it."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_rollout.coordinator.callers.pods import PodTable
from sglang_rollout.coordinator.main import find_credentials
from sglang_rollout.credentials import Credentials
from tests.support.pods import make_pod, make_table

KEY = Credentials("new", "old")
OWN = KEY.derive("fleet-engine-0")


def engine_pod(secret: str, *, name: str = "fleet-engine-0-0", uid: str = "", namespace: str = "ml") -> dict[str, Any]:
    pod = make_pod(name, uid=uid, namespace=namespace, host_network=True)
    pod["spec"]["volumes"] = [{"name": "tmp", "emptyDir": {}}, {"name": "control", "secret": {"secretName": secret}}]
    return pod


def found(table: PodTable) -> tuple[str, ...]:
    return find_credentials(KEY, table, "fleet", "fleet-engine-0").lines()


@pytest.mark.parametrize(
    "pods",
    [
        [],
        [engine_pod("fleet-credentials")],
        [engine_pod("other-control")],
        [engine_pod("fleet-control", name="fleet-engine-1-0")],
        [engine_pod("fleet-control", name="fleet-engine-0-1")],
        [engine_pod("fleet-control", namespace="other")],
    ],
    ids=["unknown pod", "this release", "key of another rollout", "another engine", "not the head pod", "another namespace"],
)
def test_an_engine_gets_its_own_credential(pods: list[dict[str, Any]]) -> None:
    assert found(make_table(*pods)) == OWN.lines()


def test_a_pod_of_an_earlier_release_gets_the_key_until_it_is_recreated() -> None:
    old, new = engine_pod("fleet-control", uid="old"), engine_pod("fleet-credentials", uid="new")
    table = make_table(old)
    assert found(table) == (*KEY.lines(), *OWN.lines())
    table.update(table.own, old | {"status": {"phase": "Succeeded"}})
    assert found(table) == OWN.lines()
    table.update(table.own, old)
    table.remove(table.own, old)
    table.update(table.own, new)
    assert found(table) == OWN.lines()
