from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sglang_rollout.api.security_spec import Security
from sglang_rollout.coordinator.callers.pods import PodTable
from sglang_rollout.coordinator.callers.watch import follow_callers
from sglang_rollout.kube.client import Listing, WatchEvent
from sglang_rollout.kube.errors import ApiUnavailable, KubeError, Refused
from sglang_rollout.kube.resources import NAMESPACES, Resource
from tests.support.pods import make_pod
from tests.support.virtual_time import run

NAMESPACE = {"metadata": {"name": "other", "labels": {"team": "a"}, "resourceVersion": "1"}}
EVERYWHERE = Security.model_validate({"trainers": {"namespaceSelector": {}}})


def _refuse(message: str) -> KubeError:
    return Refused(message, code=403)


class FakeKube:
    """An API server with some pods, whose events a test sends. ``None`` as an event breaks the watch."""

    def __init__(self, *pods: dict[str, Any]) -> None:
        self.pods = list(pods)
        self.down = False
        self.listed: list[tuple[str, str | None]] = []
        self.forbidden: set[str] = set()
        """Kinds that the coordinator may not list in all namespaces."""
        self.events: asyncio.Queue[WatchEvent | None] = asyncio.Queue()
        """Events of the rollout's namespace."""

    async def list(self, resource: Resource, namespace: str | None, **_: Any) -> Listing:
        self.listed.append((resource.plural, namespace))
        if self.down:
            raise ApiUnavailable("the API server is away")
        if namespace is None and resource.plural in self.forbidden:
            raise _refuse(f"{resource.plural} is forbidden")
        pods = [pod for pod in self.pods if namespace in (None, pod["metadata"]["namespace"])]
        return Listing([NAMESPACE] if resource == NAMESPACES else pods, "1")

    async def watch(self, resource: Resource, namespace: str | None, **_: Any) -> AsyncIterator[WatchEvent]:
        if namespace is None:
            await asyncio.sleep(1e9)
        while True:
            event = await self.events.get()
            if event is None:
                raise ApiUnavailable("the watch broke")
            yield event


def play(kube: FakeKube, *steps: Any, security: Security | None = None, reports: list[bool] | None = None) -> list[Any]:
    """Follow the pods, and return the result of each step, a function of the table, 10 s apart."""

    noted = reports if reports is not None else []

    async def main() -> list[Any]:
        table, found = PodTable("ml", lambda: 0.0), []
        current = security or Security()
        task = asyncio.create_task(follow_callers(kube, table, lambda: current, noted.append))  # type: ignore[arg-type]
        for step in steps:
            await asyncio.sleep(10)
            found.append(step(table))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return found

    return run(main())


def names(table: PodTable) -> list[str]:
    return [pod.name for address in ("10.0.0.1", "10.0.0.2") for pod in table.at(address)]


def test_the_table_follows_the_watch() -> None:
    kube = FakeKube(make_pod("a"))
    second = make_pod("b", address="10.0.0.2")

    def send(kind: Any, pod: dict[str, Any]) -> Any:
        def step(table: PodTable) -> list[str]:
            kube.events.put_nowait(WatchEvent(kind, pod))
            return names(table)

        return step

    seen = play(
        kube, send("ADDED", second), send("BOOKMARK", {"metadata": {"resourceVersion": "9"}}), send("DELETED", make_pod("a")), names
    )
    assert seen == [["a"], ["a", "b"], ["a", "b"], ["b"]]
    assert kube.listed == [("pods", "ml")]


def test_known_pods_stay_known_while_the_api_server_is_away() -> None:
    kube = FakeKube(make_pod("a"))

    def leave(table: PodTable) -> bool:
        kube.down = True
        kube.events.put_nowait(None)
        return table.is_current

    def come_back(table: PodTable) -> tuple[list[str], bool]:
        kube.down, kube.pods = False, [make_pod("b", address="10.0.0.2")]
        return names(table), table.is_current

    assert play(kube, leave, come_back, lambda table: (names(table), table.is_current)) == [True, (["a"], False), (["b"], True)]


def test_a_selector_of_namespaces_needs_all_pods_and_the_labels_of_namespaces() -> None:
    kube = FakeKube(make_pod("a", namespace="other"))
    reports: list[bool] = []
    found = play(kube, lambda table: (names(table), dict(table.namespace_labels("other") or {})), security=EVERYWHERE, reports=reports)
    assert found == [(["a"], {"team": "a"})]
    assert set(kube.listed) == {("pods", "ml"), ("pods", None), ("namespaces", None)}
    assert not any(reports)


@pytest.mark.parametrize("kind", ["pods", "namespaces"])
def test_a_missing_right_is_reported_until_it_is_granted_and_own_trainers_stay_known(kind: str) -> None:
    kube = FakeKube(make_pod("a"), make_pod("b", namespace="other", address="10.0.0.2"))
    kube.forbidden = {kind}
    reports: list[bool] = []

    def grant(table: PodTable) -> tuple[list[str], bool]:
        kube.forbidden = set()
        return names(table)[:1], table.is_forbidden

    found = play(kube, grant, lambda table: (names(table), table.is_forbidden), security=EVERYWHERE, reports=reports)
    assert found == [(["a"], True), (["a", "b"], False)]
    assert True in reports
    assert not reports[-1]


def test_pods_of_other_namespaces_are_forgotten_when_the_spec_selects_none() -> None:
    kube = FakeKube(make_pod("a"), make_pod("b", namespace="other", address="10.0.0.2"))
    current = EVERYWHERE

    async def main() -> tuple[list[str], list[str]]:
        nonlocal current
        table = PodTable("ml", lambda: 0.0)
        task = asyncio.create_task(follow_callers(kube, table, lambda: current, lambda _: None))  # type: ignore[arg-type]
        await asyncio.sleep(10)
        wide = names(table)
        current = Security()
        await asyncio.sleep(10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return wide, names(table)

    assert run(main()) == (["a", "b"], ["a"])
