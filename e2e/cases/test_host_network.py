"""Two engines in the network of one node: each has ports of its own, so both serve, and a pushed version reaches both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e import stand_in
from e2e.cases.conftest import NAME, ready, remove, remove_stand, trainer_pod
from e2e.cases.stand import Stand
from e2e.kube import Kubectl, eventually

HOSTED = "hosted"
_ASK = (
    "import json, sys, urllib.request as u\n"
    "body = {'input_ids': [11, 22, 33], 'sampling_params': {'temperature': 0, 'max_new_tokens': 4}}\n"
    "r = u.Request(sys.argv[1] + '/generate', json.dumps(body).encode(), {'Content-Type': 'application/json'})\n"
    "print(json.load(u.urlopen(r, timeout=20))['meta_info']['weight_version'])\n"
)


@pytest.fixture(scope="module")
def hosted(kubectl: Kubectl, operator: Kubectl) -> Iterator[str]:
    """A Ready rollout of two stand-ins in the network of one node; its name."""
    remove_stand(kubectl)
    remove(kubectl, NAME)  # there is no room for it beside this one
    kubectl.apply(stand_in.code())
    document = stand_in.rollout(HOSTED, replicas=2)
    document["spec"]["engine"]["network"] = {"hostNetwork": True, "basePort": 22000}
    node = next(node for node in kubectl.list("nodes") if not node["spec"].get("taints"))
    label = "kubernetes.io/hostname"
    document["spec"]["scheduling"] = {"nodeSelector": {label: node["metadata"]["labels"][label]}}
    kubectl.apply(document)
    trainer_pod(kubectl, "trainer")
    eventually("the rollout is Ready", lambda: ready(kubectl, HOSTED), within=180, every=1)
    yield HOSTED
    kubectl("delete", "pod", "trainer", "--ignore-not-found", "--wait=false")
    remove(kubectl, HOSTED)


def test_two_engines_on_one_node_serve_what_was_pushed(kubectl: Kubectl, hosted: str, tmp_path: Path) -> None:
    pods = [kubectl.get("pod", f"{hosted}-engine-{index}-0") for index in range(2)]
    address = pods[0]["status"]["hostIP"]
    assert [pod["status"]["podIP"] for pod in pods] == [address, address], "both are in the network of one node"

    with kubectl.forward(f"svc/{hosted}-router", 30000) as url:
        stand = Stand(kubectl, hosted, url, 2, tmp_path)
        try:
            label = stand.push(stand.trainer())
            stand.serve()
            eventually("the router knows both", lambda: all(member["routed"] for member in stand.members()), within=30)
        finally:
            stand.close()
        gates = {member["name"]: member["url"] for member in stand.members()}
    assert gates == {f"{hosted}-engine-0": f"http://{address}:22000", f"{hosted}-engine-1": f"http://{address}:22020"}
    for gate in gates.values():
        assert kubectl.exec("trainer", "python3", "-c", _ASK, gate, container="trainer").strip() == label
    assert [row["port"] for row in stand.status()["engines"]] == [22000, 22020]
