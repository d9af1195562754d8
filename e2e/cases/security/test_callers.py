"""Callers that must keep working without a setting, or with the setting that the documentation names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e import stand_in
from e2e.cases.actions import document
from e2e.cases.security.callers import caller_pod, change_security, reach, wait_for_pods
from e2e.cases.stand_in_rollout import StandInRollout
from e2e.chaos.trainer_process import Trainer
from e2e.kube import Kubectl, eventually
from sglang_rollout.wire.ports import FRONT_PORT

FIRST_CALL = (
    "import urllib.error, urllib.request as u\n"
    "try: print(u.urlopen('http://{name}-router:30000/fleet', timeout=20).status)\n"
    "except urllib.error.HTTPError as error: print(error.code, error.read().decode())\n"
)


def test_a_pod_is_a_trainer_in_its_first_second(stand: StandInRollout) -> None:
    """The first call may come before the kubelet has reported the address of the pod."""
    kubectl, pod = stand.kubectl, caller_pod("starter")
    pod["spec"]["restartPolicy"] = "Never"
    pod["spec"]["containers"][0]["command"] = ["python3", "-c", FIRST_CALL.format(name=stand.name)]
    kubectl("delete", "pod", "starter", "--ignore-not-found")
    kubectl.apply(pod)
    try:
        eventually("the pod has called", lambda: kubectl.get("pod", "starter")["status"]["phase"] == "Succeeded", within=60)
        assert kubectl("logs", "starter").strip() == "200"
    finally:
        kubectl("delete", "pod", "starter", "--wait=false")


def test_a_second_trainer_that_flushes_at_its_start_costs_the_first_nothing(stand: StandInRollout, sampler: str) -> None:
    """As miles starts: ``GET /flush_cache`` until it succeeds."""
    flush = f"http://{stand.name}-router:{FRONT_PORT}/flush_cache"
    trainer = stand.trainer()
    stand.push(trainer)
    assert reach(stand.kubectl, sampler, flush) == [409], "the first trainer holds the fleet"
    label = stand.push(trainer)
    assert document(stand.url)["committed"]["label"] == label
    stand.signal(trainer, "KILL")
    eventually("the second trainer flushes", lambda: reach(stand.kubectl, sampler, flush) == [200], within=30)


@pytest.fixture
def host_trainer(kubectl: Kubectl) -> Iterator[None]:
    """Create a trainer's pod in the network of its node."""
    pod = stand_in.trainer_pod("host-trainer")
    pod["spec"] |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    kubectl.apply(pod)
    wait_for_pods(kubectl, "host-trainer")
    yield
    kubectl("delete", "pod", "host-trainer", "--wait=false")


def node_addresses(kubectl: Kubectl) -> list[str]:
    """Return the addresses of the host trainer's node: with many network plugins, pods of the same node see that of a bridge."""
    found = kubectl.exec("host-trainer", "hostname", "-I", container="trainer").split()
    return [address for address in found if "." in address]


def test_a_trainer_in_the_network_of_its_node_pushes_with_cidrs(stand: StandInRollout, host_trainer: None) -> None:
    kubectl, addresses = stand.kubectl, node_addresses(stand.kubectl)
    url = f"http://{stand.name}-router:{FRONT_PORT}"
    assert reach(kubectl, "host-trainer", f"{url}/fleet", container="trainer", seconds=20) == [403]
    change_security(kubectl, stand.name, trainers={"podSelector": {}, "cidrs": [f"{address}/32" for address in addresses]})
    command = ["kubectl", "-n", kubectl.namespace, "exec", "-i", "host-trainer", "-c", "trainer", "--"]

    def is_allowed() -> bool:
        return reach(kubectl, "host-trainer", f"{url}/fleet", container="trainer", seconds=20) == [200]

    try:
        eventually("the trainer is allowed", is_allowed, within=60)
        trainer = Trainer([*command, "python", "-m", "e2e.chaos.trainer", url], stand.folder / "host-trainer.log")
        try:
            stand.push(trainer)
        finally:
            trainer.end()
    finally:
        change_security(kubectl, stand.name)
