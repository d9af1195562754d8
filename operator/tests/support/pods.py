"""Pods as the API server returns them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sglang_rollout.coordinator.callers.pods import PodTable


def make_pod(
    name: str = "train-0",
    *,
    uid: str = "",
    namespace: str = "ml",
    address: str = "10.0.0.1",
    account: str = "trainer",
    owner: str = "Job/train",
    labels: dict[str, str] | None = None,
    phase: str = "Running",
    host_network: bool = False,
    deleted: str | None = None,
) -> dict[str, Any]:
    """Return a pod. Without ``owner``, nothing controls it. ``deleted`` is the end of its grace period."""
    kind, _, controller = owner.partition("/")
    owners = [{"kind": kind, "name": controller, "uid": "o", "controller": True}] if owner else []
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid or f"{namespace}-{name}",
            "resourceVersion": "1",
            "labels": labels or {},
            "ownerReferences": owners,
            **({"deletionTimestamp": deleted} if deleted else {}),
        },
        "spec": {"serviceAccountName": account, **({"hostNetwork": True} if host_network else {})},
        "status": {"phase": phase, **({"podIP": address, "podIPs": [{"ip": address}]} if address else {})},
    }


def fill(table: PodTable, pods: Iterable[Mapping[str, Any]]) -> None:
    """Give a table all pods, of its own namespace and of others."""
    known = list(pods)
    table.replace(table.own, known)
    table.replace(table.others or table.watch_others(), known)


def make_table(*pods: Mapping[str, Any], namespace: str = "ml") -> PodTable:
    """Return a table with these pods at the Unix time 0."""
    table = PodTable(namespace, lambda: 0.0)
    fill(table, pods)
    return table
