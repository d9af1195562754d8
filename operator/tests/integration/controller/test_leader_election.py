"""Two coordinators and one Lease, on a real API server."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

import pytest

from sglang_rollout.coordinator.leadership import DeposedError, LeaseLeadership
from sglang_rollout.kube import lease as kube_lease
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import NotFound
from sglang_rollout.kube.lease import Lease
from sglang_rollout.kube.resources import CONFIGMAPS, LEASES, ROLLOUTS

pytestmark = pytest.mark.controlplane

ROLLOUT = {
    "apiVersion": "rollout.sglang.io/v1alpha1",
    "kind": "SGLangRollout",
    "spec": {"replicas": 0, "model": {"path": "/model"}, "engine": {"image": "none", "gpuResource": ""}},
}


@pytest.fixture
async def namespace_with_weights(kube: Kube, namespace: str) -> str:
    made = await kube.create({**ROLLOUT, "metadata": {"name": "demo", "namespace": namespace}})
    owner = {
        "apiVersion": ROLLOUT["apiVersion"],
        "kind": ROLLOUT["kind"],
        "name": "demo",
        "uid": made["metadata"]["uid"],
        "controller": True,
    }
    metadata = {"name": "demo-weights", "namespace": namespace, "ownerReferences": [owner]}
    await kube.create({"apiVersion": "v1", "kind": CONFIGMAPS.kind, "metadata": metadata})
    return namespace


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_lease, "DURATION_SECONDS", 2.0)
    monkeypatch.setattr(kube_lease, "RENEW_SECONDS", 0.2)


def candidate(kube: Kube, namespace: str, identity: str) -> LeaseLeadership:
    owners = partial(kube_lease.find_owners_of, kube, namespace, "demo-weights")
    lease = Lease(kube, namespace=namespace, name="demo-router", identity=identity, find_owners=owners)
    return LeaseLeadership(lease)


async def lease(kube: Kube, namespace: str) -> dict[str, object]:
    return dict((await kube.get(LEASES, namespace, "demo-router"))["spec"])


async def test_second_coordinator_waits_and_then_leads_under_a_higher_term(kube: Kube, namespace_with_weights: str) -> None:
    first, second = candidate(kube, namespace_with_weights, "pod-a"), candidate(kube, namespace_with_weights, "pod-b")
    assert await first.acquire() == 1
    await first.announce(5)
    renewing = asyncio.create_task(first.hold())
    taking = asyncio.create_task(second.acquire())
    await asyncio.sleep(3)
    assert not taking.done(), "the first is alive"
    renewing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await renewing
    assert await asyncio.wait_for(taking, 10) == 6
    assert (await lease(kube, namespace_with_weights))["holderIdentity"] == "pod-b"
    with pytest.raises(DeposedError, match="pod-b has taken the Lease demo-router"):
        await asyncio.wait_for(first.hold(), 5)


async def test_free_or_own_lease_is_acquired_immediately(kube: Kube, namespace_with_weights: str) -> None:
    first = candidate(kube, namespace_with_weights, "pod-a")
    assert await first.acquire() == 1
    assert await asyncio.wait_for(candidate(kube, namespace_with_weights, "pod-a").acquire(), 1) == 2, "its container was restarted"
    again = candidate(kube, namespace_with_weights, "pod-a")
    assert await again.acquire() == 3
    await again.release()
    assert await asyncio.wait_for(candidate(kube, namespace_with_weights, "pod-c").acquire(), 1) == 4


async def test_lease_is_deleted_with_its_rollout(kube: Kube, namespace_with_weights: str) -> None:
    await candidate(kube, namespace_with_weights, "pod-a").acquire()
    made = await kube.get(LEASES, namespace_with_weights, "demo-router")
    (owner,) = made["metadata"]["ownerReferences"]
    rollout = await kube.get(ROLLOUTS, namespace_with_weights, "demo")
    assert (owner["kind"], owner["uid"]) == ("SGLangRollout", rollout["metadata"]["uid"])
    assert set(owner) == {"apiVersion", "kind", "name", "uid"}, "more needs rights over the owner in some clusters"


async def test_deleted_lease_is_recreated_and_terms_still_grow(kube: Kube, namespace_with_weights: str) -> None:
    first = candidate(kube, namespace_with_weights, "pod-a")
    await first.acquire()
    await first.announce(9)
    await kube.delete(LEASES, namespace_with_weights, "demo-router")
    renewing = asyncio.create_task(first.hold())
    try:
        term = None
        for _ in range(50):
            await asyncio.sleep(0.1)
            with contextlib.suppress(NotFound):
                term = (await lease(kube, namespace_with_weights)).get("leaseTransitions")
            if term == 9:
                break
        assert term == 9, "it was not made again under the term that is led"
    finally:
        renewing.cancel()
