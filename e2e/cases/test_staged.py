"""Transport Staged on a cluster: uploads, process groups that stay open, loads in turn, and engines and weight stores that restart.

The fleet of real SGLang engines shows that a version reaches the tokens and returns after a restart. Stand-ins, which start in seconds,
show the same for each pod that can be lost, while clients check the tokens of every answer.

STAGED_UPDATES: number of updates of the trainer that never opens a second process group (6).
STAGED_ENGINES=sglang: its engines are real.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from e2e import stand_in
from e2e.cases.actions import KILL, ask_engines, document, forward, push, serving
from e2e.cases.claim import GROUP, claim
from e2e.cases.conftest import ready, remove, remove_stand, sample, trainer_pod
from e2e.cases.security.callers import SILENT, reach
from e2e.cases.stand_in_rollout import StandInRollout
from e2e.cases.test_faults import member, members, restarts
from e2e.chaos.tokens import FEW, known
from e2e.chaos.trainer_process import Trainer
from e2e.chaos.watch import Watch
from e2e.kube import Kubectl, Refused, condition, eventually
from e2e.machine_token import TOKEN
from e2e.neighbours import policy_agent
from sglang_rollout.wire.ports import METRICS_PORT, STAGING_PORT, STORE_PORT

UPDATES = int(os.environ.get("STAGED_UPDATES", "6"))
NAME, STAND, SNAPSHOTS = "staged", "copies", "staged-snapshots"
WEIGHTS: dict[str, Any] = {"transport": "Staged", "staging": {"sizeLimit": "32Mi"}}
TINY = "/models/tiny"
TRAINER = (Path(__file__).parent / "one_group_trainer.py").read_text()


@pytest.fixture(scope="module")
def staged_fleet(kubectl: Kubectl, operator: Kubectl, client: str) -> Iterator[str]:
    """Create a rollout of two SGLang engines with transport Staged, and return its name."""
    remove_stand(kubectl)
    rollout = sample(NAME)
    rollout["spec"]["weights"] |= {"transport": "Staged", "staging": WEIGHTS["staging"] | {"trainerPause": "Defer"}}
    with fleet_of(kubectl, rollout) as name:
        yield name


@pytest.fixture(scope="module")
def staged_stand(kubectl: Kubectl, operator: Kubectl, client: str) -> Iterator[str]:
    """Create a rollout of two stand-ins with transport Staged, and return its name.

    The images have no root user, and the weight store writes snapshots on a claim.
    """
    remove_stand(kubectl)
    kubectl("delete", "sglr", NAME, "--ignore-not-found", "--wait=false")
    trainer_pod(kubectl, "trainer")  # it empties the folder in which the claim is
    with claim(kubectl, SNAPSHOTS, client):
        store = {"snapshots": {"volume": {"claim": SNAPSHOTS}}}
        rollout = stand_in.rollout(STAND, replicas=2, weights=WEIGHTS | {"store": store})
        rollout["spec"]["podTemplate"]["spec"]["securityContext"] = {"runAsNonRoot": True, "fsGroup": GROUP}
        with fleet_of(kubectl, rollout) as name:
            yield name
    kubectl("delete", "pod", "trainer", "--ignore-not-found", "--wait=false")


@contextlib.contextmanager
def fleet_of(kubectl: Kubectl, rollout: dict[str, Any], within: float = 300) -> Iterator[str]:
    """Apply a rollout, and wait until it is Ready. Remove it at the end."""
    name = rollout["metadata"]["name"]
    remove(kubectl, name)
    kubectl.apply(rollout)
    eventually("the rollout is Ready", lambda: ready(kubectl, name), within=within, every=1)
    yield name
    remove(kubectl, name)


@pytest.fixture
def url(kubectl: Kubectl, staged_fleet: str) -> Iterator[str]:
    with kubectl.forward(f"svc/{staged_fleet}-router", 30000) as address:
        serving(address, 2)
        yield address


@pytest.fixture(scope="module")
def stand(kubectl: Kubectl, staged_stand: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandInRollout]:
    with kubectl.forward(f"svc/{staged_stand}-router", 30000) as address:
        made = StandInRollout(kubectl, staged_stand, address, 2, tmp_path_factory.mktemp("staged"))
        yield made
        made.close()


@pytest.fixture(scope="module")
def uploader(stand: StandInRollout) -> Trainer:
    return stand.trainer()


@pytest.fixture
def watch(stand: StandInRollout, uploader: Trainer) -> Iterator[Watch]:
    """Upload a version, and let clients check every answer by its tokens. A wrong answer fails the case."""
    stand.serve(2)
    made = Watch(stand.url, {})
    stand.push(uploader, made)
    made.start(FEW, FEW)
    yield made
    check_answers(made)


def check_answers(watch: Watch) -> None:
    """Stop the clients when they have got some more answers, and assert that all answers were right."""
    answered = watch.answers
    eventually("the clients got answers", lambda: watch.answers > answered + 5)
    watch.stop()
    assert watch.violations == []


def uid(kubectl: Kubectl, pod: str) -> str:
    return str(kubectl.get("pod", pod)["metadata"]["uid"])


def tokens(kubectl: Kubectl, url: str) -> dict[str, tuple[list[int], str]]:
    """Return what each engine generates, and the version that it names."""
    return {name: (answer["output_ids"], answer["meta_info"]["weight_version"]) for name, answer in ask_engines(kubectl, url).items()}


def events(kubectl: Kubectl, rollout: dict[str, Any]) -> list[str]:
    """Return the reasons of the Events about a rollout. Events about a deleted one of the same name are left out."""
    return [event["reason"] for event in kubectl.list("events") if event["involvedObject"].get("uid") == rollout["metadata"]["uid"]]


# --- SGLang ------------------------------------------------------------------------------------------------------------


def test_an_upload_reaches_every_engine_and_the_status(kubectl: Kubectl, staged_fleet: str, url: str) -> None:
    before = push(kubectl, staged_fleet, "101", seed=1)["engines"]
    after = push(kubectl, staged_fleet, "102", seed=2)["engines"]
    right = forward(kubectl, TINY, 2)
    assert after == {f"{staged_fleet}-engine-{index}": {"ids": right, "version": "102"} for index in (0, 1)}
    assert all(before[name]["ids"] != right for name in before)
    seen = document(url)
    assert (seen["transport"], seen["world_size"], seen["groups"]) == ("Staged", 2, [])
    assert {"stage", "canary", "activate"} <= set(seen["last_update"]["phases_ms"]), "the version went through the weight store"

    def row() -> list[str]:
        _, line = kubectl("get", "sglr", staged_fleet).strip().splitlines()
        return line.split()[:-1]

    eventually("the columns name the version", lambda: row() == [staged_fleet, "2/2", "2", "102", "0", "Active", "AllServing"])
    rollout = kubectl.get("sglr", staged_fleet)
    assert rollout["status"]["weights"]["lastUpdate"]["outcome"] == "Committed"
    assert condition(rollout, "Degraded")["status"] == "False"
    found = events(kubectl, rollout)
    assert "WeightsCommitted" in found
    assert "EngineLost" not in found, "engines that load a version are not lost"


def test_a_fleet_whose_engines_all_end_at_once_serves_its_version_without_a_push(kubectl: Kubectl, staged_fleet: str, url: str) -> None:
    pushed = push(kubectl, staged_fleet, "103", seed=3)["engines"]
    pods = [f"{name}-0" for name in pushed]
    before = [(uid(kubectl, pod), restarts(kubectl, pod, "engine")) for pod in pods]
    committed = document(url)["committed"]
    for pod in pods:
        kubectl.exec(pod, "sh", "-c", KILL, container="engine")
    eventually("no engine serves", lambda: document(url)["serving"] == 0)
    serving(url, 2)
    assert document(url)["committed"] == committed
    assert tokens(kubectl, url) == {name: (answer["ids"], "103") for name, answer in pushed.items()}
    assert [(uid(kubectl, pod), restarts(kubectl, pod, "engine")) for pod in pods] == [(same, count + 1) for same, count in before]


_CALL = "import requests, sys; print(requests.post(sys.argv[1], json={'mode': 'retract'}, timeout=60).text)"


def test_engines_generate_while_a_trainer_pauses_the_fleet(kubectl: Kubectl, staged_fleet: str, url: str) -> None:
    """With ``trainerPause: Defer``, until they load the trainer's next version."""

    def call(path: str) -> dict[str, Any]:
        return dict(json.loads(kubectl.exec("client", "python", "-c", _CALL, f"http://{staged_fleet}-router:30000{path}", timeout=90)))

    old = push(kubectl, staged_fleet, "104", seed=4)["engines"]
    assert call("/pause_generation")["fleet"]["deferred"]
    assert call("/flush_cache")["success"], "trainers repeat the call until it succeeds"
    assert tokens(kubectl, url) == {name: (answer["ids"], "104") for name, answer in old.items()}
    seen = document(url)
    assert (seen["pause_deferred"], seen["phase"], seen["serving"]) == (True, "idle", 2)
    new = push(kubectl, staged_fleet, "105", seed=5)["engines"]
    assert {answer["version"] for answer in new.values()} == {"105"}
    assert all(new[name]["ids"] != old[name]["ids"] for name in new)
    assert call("/continue_generation")["success"]
    assert tokens(kubectl, url) == {name: (answer["ids"], "105") for name, answer in new.items()}


# --- stand-ins ---------------------------------------------------------------------------------------------------------


def test_an_engine_whose_container_is_killed_loads_the_copy_in_its_pod(kubectl: Kubectl, stand: StandInRollout, watch: Watch) -> None:
    committed, pod = document(stand.url)["committed"], f"{stand.engine(1)}-0"
    before = uid(kubectl, pod)
    kubectl.exec(pod, "sh", "-c", KILL, container="engine")
    stand.serve(1)
    stand.serve(2)
    assert uid(kubectl, pod) == before
    assert document(stand.url)["committed"] == committed


def test_a_new_pod_copies_the_version_and_serves_it_without_a_push(kubectl: Kubectl, stand: StandInRollout, watch: Watch) -> None:
    committed, name = document(stand.url)["committed"], stand.engine(0)
    before = uid(kubectl, f"{name}-0")
    kubectl("delete", "pod", f"{name}-0", "--grace-period=1", "--wait=false")
    stand.serve(1)
    stand.serve(2)
    assert uid(kubectl, f"{name}-0") != before
    seen = member(stand.url, name)
    assert seen["version"] == committed
    assert [copy["version"] for copy in seen["staged"]] == [committed]
    peer, update = kubectl.get("pod", f"{stand.engine(1)}-0")["status"]["podIP"], seen["staged"][0]["update"]
    log = kubectl("logs", f"{name}-0", "-c", "agent")
    found = re.search(rf"The copy of update {update} is complete: (\d+) bytes \((.*)\)\.", log)
    assert found, log
    assert found[2] == f"{found[1]} from http://{peer}:{STAGING_PORT}", "the other engine gave the version, not the weight store"


def test_a_new_pod_of_the_store_copies_the_version_from_the_engines(
    kubectl: Kubectl, stand: StandInRollout, uploader: Trainer, watch: Watch
) -> None:
    committed, pod = document(stand.url)["committed"], f"{stand.name}-store-0"
    before, instance = uid(kubectl, pod), document(stand.url)["store"]["instance"]
    kubectl("delete", "pod", pod, "--grace-period=1", "--wait=false")

    def has_copied() -> bool:
        store = document(stand.url)["store"]
        return bool(store["up"]) and store["instance"] != instance and [copy["version"] for copy in store["copies"]] == [committed]

    eventually("the new store has the version", has_copied)
    assert uid(kubectl, pod) != before
    assert document(stand.url)["serving"] == 2
    stand.push(uploader, watch)
    stand.serve(2)


def test_engines_load_in_turn_while_clients_generate(stand: StandInRollout, uploader: Trainer, watch: Watch) -> None:
    in_turn = {"versionPolicy": "MaxStaleness", "maxStaleness": 1, "activation": {"strategy": "Rolling", "maxUnavailable": 1}}
    before = document(stand.url)["committed"]["label"]
    looks: list[set[str]] = []
    with stand.policy(**in_turn), ThreadPoolExecutor(1) as pool:
        for index in (0, 1):
            stand.fault(index, "slow", "load", seconds=1.0)
        errors = watch.errors
        pushing = pool.submit(stand.push, uploader, watch)
        while not pushing.done():
            looks.append({row["version"]["label"] for row in document(stand.url)["members"] if row["gate_open"]})
            time.sleep(0.05)
        after = pushing.result()
        answered = watch.answers
        eventually("clients got answers of the new version", lambda: after in watch.answered and watch.answers > answered + 5)
        assert watch.errors == errors, "no request failed"
    assert all(looks), "one engine served at each time"
    assert {before} in looks, "the other engine served the version before meanwhile"
    assert {before, after} <= watch.answered
    assert document(stand.url)["last_update"]["outcome"] == "Committed"


WEIGHTS_COMMAND = "python -m sglang_rollout.cli weights"
"""``sglang-rollout weights`` in a trainer's pod, which has our library and not the command."""


def test_a_fleet_whose_pods_all_end_serves_its_version_again(
    kubectl: Kubectl, stand: StandInRollout, uploader: Trainer, watch: Watch
) -> None:
    """With the snapshots of the weight store on a claim, which the command lists, verifies and exports."""
    first = document(stand.url)["committed"]
    second = stand.push(uploader, watch)
    committed = document(stand.url)["committed"]

    def written() -> bool:
        return [first, committed] == [row["version"] for row in document(stand.url)["store"]["snapshots"]["snapshots"]][-2:]

    eventually("both versions have a snapshot", written)
    pods = [f"{stand.engine(0)}-0", f"{stand.engine(1)}-0", f"{stand.name}-store-0"]
    ended = {pod: uid(kubectl, pod) for pod in pods}
    kubectl("delete", "pod", *pods, "--grace-period=1", "--wait=false")
    eventually("all pods are replaced", lambda: all(uid(kubectl, pod) != ended[pod] for pod in pods))
    stand.serve(2)
    assert document(stand.url)["committed"] == committed

    def weights(*words: str) -> str:
        command = f"SGLANG_ROLLOUT_URL=http://{stand.name}-router:30000 {WEIGHTS_COMMAND} {' '.join(words)}"
        return kubectl.exec("trainer", "sh", "-c", command, container="trainer")

    number = f"{first['run']}/{first['step']}"
    assert f"{number} ({first['label']}): OK\n" in weights("verify")
    outside = [sys.executable, "-m", "sglang_rollout.cli", "weights", "ls", "--url", stand.url]
    listed = subprocess.run(
        outside, env=os.environ | {"SGLANG_ROLLOUT_TOKEN": TOKEN}, capture_output=True, text=True, timeout=60, check=True
    )
    (row,) = (line for line in listed.stdout.splitlines() if f" {second} " in line)
    assert "committed, store, snapshot, 2 of 2 engines" in row
    weights("export", number, "--to", f"/tmp/{first['label']}", "--model", TINY)
    assert "00000.safetensors" in kubectl.exec("trainer", "ls", f"/tmp/{first['label']}", container="trainer")


def test_the_store_exports_metrics(kubectl: Kubectl, stand: StandInRollout, uploader: Trainer) -> None:
    stand.push(uploader)
    copies = document(stand.url)["store"]["copies"]
    pod = kubectl.get("pod", f"{stand.name}-store-0")
    (port,) = (port["containerPort"] for port in pod["spec"]["containers"][0]["ports"] if port["name"] == "metrics")
    read = "import requests, sys; print(requests.get(sys.argv[1], timeout=10).text)"
    scraped = kubectl.exec("trainer", "python", "-c", read, f"http://{pod['status']['podIP']}:{port}/metrics", container="trainer")
    values = dict(line.split() for line in scraped.splitlines() if line and not line.startswith("#"))
    assert float(values["sglang_rollout_store_versions"]) == len(copies)
    assert float(values["sglang_rollout_store_version_bytes"]) == sum(copy["bytes"] for copy in copies)
    assert float(values["sglang_rollout_store_uploaded_bytes_total"]) >= copies[-1]["bytes"]
    assert (values["sglang_rollout_store_process_groups"], values["sglang_rollout_store_snapshot_failures_total"]) == ("0.0", "0.0")


def test_the_store_runs_at_the_restricted_level_of_pod_security(kubectl: Kubectl, staged_stand: str) -> None:
    """With an image that has no root user: ``podTemplate`` declares it for the engines' image, which the store has, too."""
    namespace = "restricted"
    kubectl("create", "namespace", namespace)
    try:
        kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
        pod = kubectl.get("pod", f"{staged_stand}-store-0")
        spec = {key: value for key, value in pod["spec"].items() if key not in {"nodeName", "serviceAccount", "priority"}}
        copy = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "store"}, "spec": spec | {"serviceAccountName": "default"}}
        Kubectl(namespace)("create", "--dry-run=server", "-f", "-", stdin=json.dumps(copy))
    finally:
        kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.mark.neighbours
def test_enforced_policies_admit_what_transport_staged_needs_and_nothing_else(
    kubectl: Kubectl, stand: StandInRollout, uploader: Trainer, client: str, tmp_path: Path
) -> None:
    """Uploads, copies between pods, and the process group of trainer and store, in both directions."""
    engine, store = f"{stand.engine(0)}-0", f"{stand.name}-store-0"
    with policy_agent.running(tmp_path):
        eventually("the condition is Enforced", lambda: stand.condition("NetworkIsolated")["reason"] == "Enforced", within=120, every=2)
        stand.push(uploader)
        for pod in (engine, store):
            replace_pod(kubectl, pod)
            eventually("all pods hold the version", lambda: holds_everywhere(stand.url))
        with one_group_trainer(kubectl, client, stand.name, "stand-in", tmp_path) as trainer:
            trainer.begin(stand.label())
            assert trainer.outcome(120)["ok"]
        closed = ((store, STORE_PORT), (store, STAGING_PORT), (engine, STAGING_PORT))
        urls = [f"http://{kubectl.get('pod', pod)['status']['podIP']}:{port}/" for pod, port in closed]
        assert reach(kubectl, "trainer", *urls) == [SILENT] * 3
        scraped = [f"http://{kubectl.get('pod', pod)['status']['podIP']}:{METRICS_PORT}/metrics" for pod in (store, engine)]
        assert reach(kubectl, "trainer", *scraped) == [200, 200]


def replace_pod(kubectl: Kubectl, pod: str) -> None:
    """Delete a pod, and wait until its successor exists."""
    before = uid(kubectl, pod)
    kubectl("delete", "pod", pod, "--grace-period=1", "--wait=false")
    eventually(f"pod {pod} is replaced", lambda: uid(kubectl, pod) != before)


def holds_everywhere(url: str) -> bool:
    """Return whether both engines serve the committed version, and their pods and the weight store hold it."""
    seen = document(url)
    rows = [*(member["staged"] for member in seen["members"]), seen["store"]["copies"]]
    return seen["serving"] == 2 and seen["store"]["up"] and all(seen["committed"] in [copy["version"] for copy in row] for row in rows)


# --- a process group that stays open -----------------------------------------------------------------------------------

OPEN_FLEET = "staged_fleet" if os.environ.get("STAGED_ENGINES") == "sglang" else "staged_stand"
"""Fixture of the fleet whose trainer opens one process group."""


@pytest.fixture
def open_fleet(kubectl: Kubectl, request: pytest.FixtureRequest) -> tuple[str, str]:
    """Return the name and the model of the fleet whose trainer opens one process group."""
    return request.getfixturevalue(OPEN_FLEET), TINY if OPEN_FLEET == "staged_fleet" else "stand-in"


@contextlib.contextmanager
def one_group_trainer(kubectl: Kubectl, client: str, fleet: str, model: str, folder: Path) -> Iterator[Trainer]:
    """Start a trainer that opens one process group, and never another."""
    command = ["kubectl", "-n", kubectl.namespace, "exec", "-i", client, "-c", "trainer", "--", "python", "-c", TRAINER]
    command += [f"http://{fleet}-router:30000", model]
    made = Trainer(command, folder / "trainer.log", expected=lambda _, tokens: known(json.loads(tokens)))
    try:
        yield made
    finally:
        with contextlib.suppress(Refused):  # the trainer has ended already
            kubectl.exec(client, "sh", "-c", f"kill -KILL {made.pid}", container="trainer")
        made.end()


def change(kubectl: Kubectl, fleet: str, url: str, number: int) -> None:
    """Add, kill or remove engines before the update with this number. Some updates run while engines start."""

    def scale(engines: int) -> None:
        kubectl("scale", "sglr", fleet, f"--replicas={engines}")
        eventually(f"the fleet has {engines} engines", lambda: len(members(url)) == engines, every=0.2)

    steps: list[Callable[[], object]] = [
        lambda: serving(url, len(members(url))),
        lambda: scale(3),
        lambda: kubectl.exec(f"{fleet}-engine-0-0", "sh", "-c", KILL, container="engine"),
        lambda: serving(url, 3),
        lambda: scale(1),
        lambda: scale(2),
    ]
    steps[number % len(steps)]()


def check_gates(url: str) -> None:
    """Assert that every open gate has the committed version behind it."""
    seen = document(url)
    assert [row for row in seen["members"] if row["gate_open"] and row["version"] != seen["committed"]] == []
    assert any(row["gate_open"] for row in seen["members"])


@pytest.mark.usefixtures(OPEN_FLEET)  # so that the case runs beside the others of this fleet
def test_a_trainer_that_opens_its_process_group_once_updates_engines_that_come_and_go(
    kubectl: Kubectl, open_fleet: tuple[str, str], client: str, tmp_path: Path
) -> None:
    fleet, model = open_fleet
    run = int(time.time())
    with kubectl.forward(f"svc/{fleet}-router", 30000) as url, one_group_trainer(kubectl, client, fleet, model, tmp_path) as trainer:
        serving(url, 2)
        watch = Watch(url, {})
        for number in range(UPDATES):
            change(kubectl, fleet, url, number)
            label = str(run + number)
            watch.expected[label] = trainer.begin(label)
            outcome = trainer.outcome(120)
            assert outcome["ok"], (number, outcome)
            watch.committed(label)
            if not number:
                watch.start(FEW, FEW)
            assert document(url)["committed"]["label"] == label
            check_gates(url)
        check_answers(watch)
        assert [group["members"] for group in document(url)["groups"]] == [["weight store"]]
    kubectl("scale", "sglr", fleet, "--replicas=2")
