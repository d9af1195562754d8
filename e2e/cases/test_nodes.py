"""One engine over two pods on two nodes (on one, where your own cluster has no more): real SGLang with two tensor-parallel ranks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.cases.actions import document, generate, push, serving
from e2e.cases.conftest import NAME, ready, remove, remove_stand
from e2e.cases.ranks import checksums, two_ranks
from e2e.cluster import nodes
from e2e.kube import Kubectl, eventually

WIDE = "wide"
ENGINE = f"{WIDE}-engine-0"
_KILL = (
    "import os, pathlib\n"
    "for folder in pathlib.Path('/proc').glob('[0-9]*'):\n"
    "    words = (folder / 'cmdline').read_bytes().split(b'\\0')\n"
    "    if words[1:3] == [b'-m', b'sglang.launch_server']:\n"
    "        os.kill(int(folder.name), 9)\n"
)


def several_nodes(kubectl: Kubectl) -> bool:
    """Always on the lab that `make test` makes."""
    found = len(kubectl.list("nodes"))
    assert found > 1 or os.environ.get("CLUSTER", "lab") != "lab", "the lab has one node: python -m e2e.cluster up --nodes 2"
    return found > 1


@pytest.fixture(scope="module")
def wide(kubectl: Kubectl, operator: Kubectl, client: str) -> Iterator[str]:
    """A Ready rollout of one engine with two pods, each on a node of its own."""
    remove_stand(kubectl)
    remove(kubectl, NAME)  # there is no room for it beside this one
    made = two_ranks(WIDE, nodes=2)
    if several_nodes(kubectl):
        own = {"rollout.sglang.io/rollout": WIDE, "app.kubernetes.io/component": "engine"}
        apart = [{"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": own}}]
        made["spec"]["scheduling"] = {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": apart}}}
    kubectl.apply(made)
    eventually("the rollout is Ready", lambda: ready(kubectl, WIDE), within=400, every=2)
    yield WIDE
    remove(kubectl, WIDE)


@pytest.fixture
def url(kubectl: Kubectl, wide: str) -> Iterator[str]:
    """The fleet's URL."""
    with kubectl.forward(f"svc/{wide}-router", 30000) as address:
        yield address


def pods(kubectl: Kubectl) -> list[dict[str, Any]]:
    return [kubectl.get("pod", f"{ENGINE}-{rank}") for rank in range(2)]


def restarts(kubectl: Kubectl) -> list[int]:
    """Of both engine containers."""
    return [
        next(status["restartCount"] for status in pod["status"]["containerStatuses"] if status["name"] == "engine") for pod in pods(kubectl)
    ]


def back(kubectl: Kubectl, url: str, boot: str) -> None:
    """Wait until the engine is up in another life: as a unit, without weights that were pushed."""

    def up() -> bool:
        member = document(url)["members"][0]
        return member["boot_id"] not in (None, boot) and member["state"] == "clean"

    eventually("the engine is up again", up, within=300, every=2)
    assert not document(url)["members"][0]["gate_open"], "it holds base weights"


def test_an_update_reaches_the_ranks_of_both_pods_and_a_dead_rank_takes_the_other_along(kubectl: Kubectl, wide: str, url: str) -> None:
    places = [pod["spec"]["nodeName"] for pod in pods(kubectl)]
    assert len(set(places)) == (2 if several_nodes(kubectl) else 1), "a node for each"
    assert kubectl.get("sglr", wide)["status"]["engines"][0]["nodes"] == places
    base = checksums(kubectl, ENGINE)
    push(kubectl, wide, "1", seed=1)
    pushed = checksums(kubectl, ENGINE)
    assert set(pushed).isdisjoint(base), "every rank holds something else now"
    tokens = generate(url).json()["output_ids"]

    before, boot = restarts(kubectl), document(url)["members"][0]["boot_id"]
    kubectl.exec(f"{ENGINE}-1", "python3", "-c", _KILL, container="engine")
    eventually("it serves nobody", lambda: not document(url)["members"][0]["gate_open"], within=90)
    back(kubectl, url, boot)
    assert restarts(kubectl) == [count + 1 for count in before], "once each"
    assert checksums(kubectl, ENGINE) == base
    push(kubectl, wide, "2", seed=1)
    serving(url, 1, within=30)
    assert checksums(kubectl, ENGINE) == pushed
    assert generate(url).json()["output_ids"] == tokens
    push(kubectl, wide, "3", seed=0)
    assert checksums(kubectl, ENGINE) == base, "on both nodes what they were started with, to the bit"


def test_a_dead_rank_0_takes_the_other_along(kubectl: Kubectl, wide: str, url: str) -> None:
    push(kubectl, wide, "4", seed=1)
    before, boot = restarts(kubectl), document(url)["members"][0]["boot_id"]
    kubectl.exec(f"{ENGINE}-0", "python3", "-c", _KILL, container="engine")
    back(kubectl, url, boot)
    assert restarts(kubectl) == [count + 1 for count in before], "once each"


def test_a_cut_between_the_pods_ends_both_ranks(kubectl: Kubectl, wide: str, url: str) -> None:
    if os.environ.get("CLUSTER", "lab") != "lab":
        pytest.skip("only on the lab can a pod's network be cut from outside")
    found = pods(kubectl)
    before, boot = restarts(kubectl), document(url)["members"][0]["boot_id"]
    inside, other = nodes.processes(f"{ENGINE}-0")[0], found[1]["status"]["podIP"]
    _drop("-I", inside, other)
    try:
        assert eventually("both have ended", lambda: restarts(kubectl) == [count + 1 for count in before], within=120, every=1)
        why = f"now for {ENGINE}-1; it ended because pod {ENGINE}-1 could not be reached"
        assert eventually("it says what it waits for", lambda: why in document(url)["members"][0]["message"], within=60)
    finally:
        _drop("-D", inside, other)
    back(kubectl, url, boot)


def _drop(action: str, inside: int, other: str) -> None:
    """Let the network of one pod, named by a process in it, drop what comes from another pod and what goes there."""
    for chain, side in (("INPUT", "-s"), ("OUTPUT", "-d")):
        command = ["nsenter", "-t", str(inside), "--net", "iptables", action, chain, side, other, "-j", "DROP"]
        subprocess.run(command, check=True, capture_output=True, timeout=10)
