"""Each attack of the documentation's table, tried on a fleet whose cluster enforces no NetworkPolicies."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from e2e import stand_in
from e2e.cases.actions import document
from e2e.cases.conftest import remove
from e2e.cases.security.attacks import ATTACKS, ENGINES, OTHER_ROLLOUT, ROLLOUT, Attack
from e2e.cases.security.callers import caller_pod, wait_for_pods
from e2e.cases.security.scene import ATTACKER, HOST_ATTACKER, Scene, find_hosts, find_words, other_rollout, other_secret
from e2e.cases.stand_in_rollout import StandInRollout, let_all_serve
from e2e.cases.test_faults import router_pod
from e2e.kube import Kubectl, condition, eventually
from sglang_rollout.controller.render import names


@pytest.fixture(scope="module")
def attackers(kubectl: Kubectl, operator: Kubectl) -> Iterator[None]:
    """Create the pods of the attackers and another rollout. They start while the attacked fleet starts."""
    for made in (stand_in.code(), other_secret(), other_rollout(), caller_pod(ATTACKER), caller_pod(HOST_ATTACKER, host_network=True)):
        kubectl.apply(made)
    yield
    kubectl("delete", "pod", ATTACKER, HOST_ATTACKER, "--ignore-not-found", "--wait=false")
    remove(kubectl, OTHER_ROLLOUT)


@pytest.fixture(scope="module")
def scene(attackers: None, kubectl: Kubectl, outsider: str, stand_fleet: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Let the attacked fleet serve a version, and wait for the attackers."""
    kubectl("label", "pod", "trainer", "app=trainer", "--overwrite")
    with kubectl.forward(f"svc/{stand_fleet}-router", 30000) as url:
        stand = StandInRollout(kubectl, stand_fleet, url, ENGINES, tmp_path_factory.mktemp("scene"))
        let_all_serve(stand)
        wait_for_pods(kubectl, ATTACKER, HOST_ATTACKER)
        eventually("the other rollout sleeps for its trainer", lambda: is_asleep(kubectl), within=120, every=1)
        hosts = find_hosts(kubectl, stand, router_pod(kubectl, stand_fleet))
        yield Scene(stand, outsider, hosts, find_words(kubectl, stand), document(url))
        stand.close()


def is_asleep(kubectl: Kubectl) -> bool:
    """Return whether the trainer of the other rollout has the memory of its engine."""
    return condition(kubectl.get("sglr", OTHER_ROLLOUT), "Ready")["reason"] == "AsleepForTrainer"


INSIDE = """
import json, os, socket, sys
folders = ("/run", "/tmp", "/dev/shm", "/etc", "/var")
sockets = [entry.path for top in folders for folder, _, _ in os.walk(top) for entry in os.scandir(folder)
           if not entry.is_file(follow_symlinks=False) and not entry.is_dir() and not entry.is_symlink()]
try:
    raw = bool(socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
except PermissionError:
    raw = False
print(json.dumps({"folders": [path for path in sys.argv[1:] if os.path.exists(path)], "sockets": sockets, "reads traffic": raw}))
"""
"""Runs in an engine container: which of the given folders exist, sockets, and whether a process may read the traffic of its pod."""


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_attack_is_refused(scene: Scene, attack: Attack) -> None:
    answers = scene.answers(attack)
    wrong = {
        f"{request.method} {request.host} {request.path} {dict(request.headers)} {dict(request.body)}": answer
        for request, answer in zip(attack.requests(), answers, strict=True)
        if not attack.is_refused(*answer)
    }
    assert wrong == {}


def test_attacks_change_nothing(scene: Scene) -> None:
    for attack in ATTACKS:
        scene.answers(attack)
    after = document(scene.stand.url)
    for key in ("committed", "epoch", "phase", "serving"):
        assert after[key] == scene.before[key], key
    assert [row["boot_id"] for row in after["members"]] == [row["boot_id"] for row in scene.before["members"]]
    assert after["serving"] == scene.stand.engines


@pytest.mark.parametrize("pod", [f"{ROLLOUT}-engine-0-0", f"{OTHER_ROLLOUT}-engine-0-0"])
def test_an_engine_container_finds_no_credential_and_no_socket(scene: Scene, pod: str) -> None:
    folders = (names.GATE_DIR, names.AGENT_STATE_DIR, names.CONTROL_DIR, "/var/run/secrets/kubernetes.io")
    found = json.loads(scene.kubectl.exec(pod, "python3", "-c", INSIDE, *folders, container="engine"))
    assert found == {"folders": [], "sockets": [], "reads traffic": False}
