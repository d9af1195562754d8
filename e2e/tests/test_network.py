"""The lab's address ranges do not overlap, and routes of the machine that overlap with them are found."""

from __future__ import annotations

import itertools
import json
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from e2e.cluster import network
from e2e.cluster.apiserver import SERVICE_RANGE

NODES = range(network.MAX_NODES)
BRIDGE = ip_network(f"{network.HOST}/24", strict=False)


def test_nodes_have_different_addresses_on_the_bridge() -> None:
    addresses = {network.address(node) for node in NODES}
    assert len(addresses | {network.HOST}) == network.MAX_NODES + 1
    assert all(ip_address(address) in BRIDGE for address in addresses)
    assert network.address(0) == network.API


def test_ranges_do_not_overlap() -> None:
    pods = [ip_network(network.pods(node)) for node in NODES]
    everything = [*pods, BRIDGE, ip_network(SERVICE_RANGE)]
    assert not [pair for pair in itertools.combinations(everything, 2) if pair[0].overlaps(pair[1])]
    assert all(one.subnet_of(ip_network(network.POD_RANGE)) for one in pods)  # type: ignore[arg-type]
    assert not ip_network(network.POD_RANGE).overlaps(BRIDGE), "kube-proxy masquerades traffic from outside of this range"


@pytest.mark.parametrize(
    ("routes", "found"),
    [
        ([], ""),
        ([{"dst": "default", "dev": "eth0"}, {"dst": "10.87.0.0/16", "dev": "eth0"}, {"dev": "lo"}], ""),
        ([{"dst": "10.88.76.0/24", "dev": network.BRIDGE}], ""),
        ([{"dst": "10.88.0.0/16", "dev": "cni-podman0"}], "10.88.0.0/16 dev cni-podman0"),
        ([{"dst": "10.96.0.0/12", "dev": "wg0"}], "10.96.0.0/12 dev wg0"),
    ],
)
def test_overlapping_route_is_named(monkeypatch: pytest.MonkeyPatch, routes: list[dict[str, Any]], found: str) -> None:
    monkeypatch.setattr(network, "_ip", lambda *_: json.dumps(routes) if routes else "")
    assert network.taken() == found
