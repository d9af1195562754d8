"""Two engines in the network of one node have different ports, so both serve and take a push."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e import stand_in
from e2e.cases.conftest import NAME, ready, remove, remove_stand, trainer_pod
from e2e.cases.stand_in_rollout import StandInRollout
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
    """Create a rollout of two stand-ins in the network of one node, and return its name."""
    remove_stand(kubectl)
    remove(kubectl, NAME)  # the node has no room for both fleets
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


def test_two_engines_in_one_node_network_serve_the_pushed_version(kubectl: Kubectl, hosted: str, tmp_path: Path) -> None:
    pods = [kubectl.get("pod", f"{hosted}-engine-{index}-0") for index in range(2)]
    address = pods[0]["status"]["hostIP"]
    assert [pod["status"]["podIP"] for pod in pods] == [address, address], "both pods are in the network of one node"

    with kubectl.forward(f"svc/{hosted}-router", 30000) as url:
        stand = StandInRollout(kubectl, hosted, url, 2, tmp_path)
        try:
            label = stand.push(stand.trainer())
            stand.serve()
            eventually("the router knows both engines", lambda: all(member["routed"] for member in stand.members()))
        finally:
            stand.close()
        gates = {member["name"]: member["url"] for member in stand.members()}
    assert gates == {f"{hosted}-engine-0": f"http://{address}:22000", f"{hosted}-engine-1": f"http://{address}:22020"}
    for gate in gates.values():
        assert kubectl.exec("trainer", "python3", "-c", _ASK, gate, container="trainer").strip() == label
    assert [row["port"] for row in stand.status()["engines"]] == [22000, 22020]
