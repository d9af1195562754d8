"""The Lease of a namespace belongs to its rollouts, so that Kubernetes deletes it with the last of them."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from sglang_rollout.controller.events import EventPoster
from sglang_rollout.controller.metrics import Metrics
from sglang_rollout.controller.reconcile import Result
from sglang_rollout.controller.standing import LEASE_NAME, Standing
from sglang_rollout.kube import lease as kube_lease
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import NotFound
from sglang_rollout.kube.resources import LEASES, ROLLOUTS, Object, Resource


class FakeKube:
    """An API server with rollouts and Leases. ``collect`` does what Kubernetes' garbage collector does."""

    def __init__(self, *rollouts: str) -> None:
        self.rollouts = set(rollouts)
        self.leases: dict[str, Object] = {}

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        found = self.leases.get(name) if resource is LEASES else {"metadata": {"uid": name}} if name in self.rollouts else None
        if found is None:
            raise NotFound(f"{resource.kind} {name}")
        return found

    async def create(self, made: Object) -> Object:
        self.leases[made["metadata"]["name"]] = {**made, "metadata": {**made["metadata"], "resourceVersion": "1"}}
        return self.leases[made["metadata"]["name"]]

    async def merge_patch(self, resource: Resource, namespace: str, name: str, patch: Object, **_: Any) -> Object:
        found = await self.get(resource, namespace, name)
        found["spec"] |= patch["spec"]
        return found

    def collect(self) -> None:
        for name, lease in list(self.leases.items()):
            if not {owner["uid"] for owner in lease["metadata"]["ownerReferences"]} & self.rollouts:
                del self.leases[name]


@pytest.fixture
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_rollout.controller.standing.RENEW_SECONDS", 0.02)
    monkeypatch.setattr(kube_lease, "RENEW_SECONDS", 0.02)


def make_standing(kube: FakeKube) -> Standing:
    async def reconcile(key: tuple[str, str]) -> Result:
        return Result("done" if key[1] in kube.rollouts else "gone")

    poster = cast(EventPoster, None)
    return Standing(cast(Kube, kube), reconcile, identity="o", wake=lambda _: None, events=poster, metrics=Metrics())


async def test_the_lease_is_deleted_with_the_last_rollout_and_stays_away() -> None:
    kube = FakeKube("a")
    standing = make_standing(kube)
    assert (await standing.reconcile(("n", "a"))).name == "done"
    assert [(owner["kind"], owner["name"]) for owner in kube.leases[LEASE_NAME]["metadata"]["ownerReferences"]] == [(ROLLOUTS.kind, "a")]
    kube.rollouts.clear()
    kube.collect()
    assert (await standing.reconcile(("n", "a"))).name == "gone"
    assert kube.leases == {}
    assert (await standing.reconcile(("n", "a"))).name == "gone", "a late event of the deleted rollout"
    assert kube.leases == {}
    await standing.close()


async def test_the_lease_comes_back_for_the_rollouts_that_are_left(short_intervals: None) -> None:
    kube = FakeKube("a", "b")
    standing = make_standing(kube)
    await standing.reconcile(("n", "a"))
    await standing.reconcile(("n", "b"))
    kube.rollouts.remove("a")
    kube.collect()
    assert kube.leases == {}, "b came after the Lease"
    async with asyncio.timeout(5):
        while not kube.leases:
            await asyncio.sleep(0.01)
    assert [owner["name"] for owner in kube.leases[LEASE_NAME]["metadata"]["ownerReferences"]] == ["b"]
    await standing.close()
