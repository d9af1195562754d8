"""Addresses: names of Services for a resolver without a search list."""

from __future__ import annotations

import pytest

from sglang_rollout.proxy.address import Address, complete_service_name

POD = "nameserver 10.96.0.10\nsearch rl.svc.cluster.local svc.cluster.local cluster.local example.org\noptions ndots:5\n"


@pytest.mark.parametrize(
    ("host", "settings", "full"),
    [
        ("demo-store.rl.svc", POD, "demo-store.rl.svc.cluster.local"),
        ("demo-store.rl.svc", POD.replace("cluster.local", "k8s.example.org"), "demo-store.rl.svc.k8s.example.org"),
        ("demo-store.rl.svc", POD.replace("cluster.local", "cluster.local."), "demo-store.rl.svc.cluster.local"),
        ("demo-store.rl.svc", "nameserver 10.96.0.10\n", "demo-store.rl.svc"),
        ("demo-store.rl.svc", "", "demo-store.rl.svc"),
        ("127.0.0.1", POD, "127.0.0.1"),
        ("store.example.org", POD, "store.example.org"),
    ],
)
def test_the_name_of_a_service_is_completed_from_the_search_list(host: str, settings: str, full: str) -> None:
    assert complete_service_name(host, settings) == full


def test_an_address_knows_if_its_host_is_a_name() -> None:
    assert [Address(host, 1).is_ip for host in ("127.0.0.1", "::1", "demo-store.rl.svc")] == [True, True, False]
