"""One engine with two pods on two nodes, or on one node if the cluster has only one: real SGLang with two tensor-parallel ranks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
    """Return whether the cluster has more than one node. The lab of `make test` always has."""
    found = len(kubectl.list("nodes"))
    assert found > 1 or os.environ.get("CLUSTER", "lab") != "lab", "the lab has one node: python -m e2e.cluster up --nodes 2"
    return found > 1


def apart(rollout: str) -> dict[str, Any]:
    """Return ``spec.scheduling`` that gives each engine pod of a rollout its own node."""
    own = {"rollout.sglang.io/rollout": rollout, "app.kubernetes.io/component": "engine"}
    rule = [{"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": own}}]
    return {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": rule}}}


@pytest.fixture(scope="module")
def wide(kubectl: Kubectl, operator: Kubectl, client: str) -> Iterator[str]:
    """Create a rollout of one engine with two pods on two nodes, and return its name."""
    remove_stand(kubectl)
    remove(kubectl, NAME)  # the node has no room for both fleets
    made = two_ranks(WIDE, nodes=2)
    if several_nodes(kubectl):
        made["spec"]["scheduling"] = apart(WIDE)
    kubectl.apply(made)
    eventually("the rollout is Ready", lambda: ready(kubectl, WIDE), within=400, every=2)
    yield WIDE
    remove(kubectl, WIDE)


@pytest.fixture
def url(kubectl: Kubectl, wide: str) -> Iterator[str]:
    """Forward the fleet's URL to this machine."""
    with kubectl.forward(f"svc/{wide}-router", 30000) as address:
        yield address


def pods(kubectl: Kubectl) -> list[dict[str, Any]]:
    return [kubectl.get("pod", f"{ENGINE}-{rank}") for rank in range(2)]


def restarts(kubectl: Kubectl) -> list[int]:
    """Return the restart counts of both engine containers."""
    return [
        next(status["restartCount"] for status in pod["status"]["containerStatuses"] if status["name"] == "engine") for pod in pods(kubectl)
    ]


def back(kubectl: Kubectl, url: str, boot: str) -> None:
    """Wait until the engine has a new boot ID and holds base weights."""

    def up() -> bool:
        member = document(url)["members"][0]
        return member["boot_id"] not in (None, boot) and member["state"] == "clean"

    eventually("the engine is up again", up, within=300, every=2)
    assert not document(url)["members"][0]["gate_open"], "the engine holds base weights"


def test_update_reaches_the_ranks_of_both_pods_and_both_restart_together(kubectl: Kubectl, wide: str, url: str) -> None:
    places = [pod["spec"]["nodeName"] for pod in pods(kubectl)]
    assert len(set(places)) == (2 if several_nodes(kubectl) else 1), "each pod has its own node"
    assert kubectl.get("sglr", wide)["status"]["engines"][0]["nodes"] == places
    base = checksums(kubectl, ENGINE)
    push(kubectl, wide, "1", seed=1)
    pushed = checksums(kubectl, ENGINE)
    assert set(pushed).isdisjoint(base), "every rank's weights changed"
    tokens = generate(url).json()["output_ids"]

    before, boot = restarts(kubectl), document(url)["members"][0]["boot_id"]
    kubectl.exec(f"{ENGINE}-1", "python3", "-c", _KILL, container="engine")
    eventually("the engine is fenced", lambda: not document(url)["members"][0]["gate_open"])
    back(kubectl, url, boot)
    assert restarts(kubectl) == [count + 1 for count in before], "once each"
    assert checksums(kubectl, ENGINE) == base
    push(kubectl, wide, "2", seed=1)
    serving(url, 1)
    assert checksums(kubectl, ENGINE) == pushed
    assert generate(url).json()["output_ids"] == tokens
    push(kubectl, wide, "3", seed=0)
    assert checksums(kubectl, ENGINE) == base, "both ranks hold exactly their initial weights"


def test_restart_of_rank_0_restarts_the_other_rank(kubectl: Kubectl, wide: str, url: str) -> None:
    push(kubectl, wide, "4", seed=1)
    before, boot = restarts(kubectl), document(url)["members"][0]["boot_id"]
    kubectl.exec(f"{ENGINE}-0", "python3", "-c", _KILL, container="engine")
    back(kubectl, url, boot)
    assert restarts(kubectl) == [count + 1 for count in before], "once each"


def test_network_cut_between_the_pods_restarts_both_ranks(kubectl: Kubectl, wide: str, url: str) -> None:
    if os.environ.get("CLUSTER", "lab") != "lab":
        pytest.skip("only on the lab can a pod's network be cut from outside")
    found = pods(kubectl)
    before, boot = restarts(kubectl), document(url)["members"][0]["boot_id"]
    with no_traffic(f"{ENGINE}-0", found[1]["status"]["podIP"]):
        assert eventually("both ranks have restarted", lambda: restarts(kubectl) == [count + 1 for count in before], every=1)
        why = f"now for {ENGINE}-1; it ended because pod {ENGINE}-1 could not be reached"
        assert eventually("the row names the unreachable pod", lambda: why in document(url)["members"][0]["message"])
    back(kubectl, url, boot)


@contextmanager
def no_traffic(pod: str, other: str) -> Iterator[None]:
    """Drop all traffic between a pod and the address of another pod, in the first pod's network."""
    # The open file keeps the network's name valid: containers of the pod restart meanwhile, with other process IDs.
    with Path(f"/proc/{nodes.processes(pod)[0]}/ns/net").open() as network:

        def change_rules(action: str) -> None:
            for chain, side in (("INPUT", "-s"), ("OUTPUT", "-d")):
                rule = ["iptables", action, chain, side, other, "-j", "DROP"]
                command = ["nsenter", f"--net=/proc/self/fd/{network.fileno()}", *rule]
                subprocess.run(command, check=True, capture_output=True, timeout=10, pass_fds=[network.fileno()])

        change_rules("-I")
        try:
            yield
        finally:
            change_rules("-D")
