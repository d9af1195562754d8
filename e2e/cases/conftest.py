"""Fixtures of the cases: rollouts on a real cluster, created as the README describes, and shared by the cases."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e import machine_token, stand_in
from e2e.cases.actions import document, push, serving
from e2e.cases.stand_in_rollout import StandInRollout, let_all_serve
from e2e.chaos.tokens import FEW
from e2e.chaos.watch import Watch
from e2e.kube import CASES_VALUES, ROOT, SYSTEM, Kubectl, Refused, condition, describe_pods, eventually, install_operator

NAMESPACE = "e2e"
NAME = "demo"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every case as one that needs the cluster. The limit is long, because engines start slowly on two cores."""
    for item in items:
        item.add_marker(pytest.mark.cluster)
        item.add_marker(pytest.mark.timeout(900))
    # A node of two cores has room for one fleet at a time. So the cases are sorted by the fleet that they use.
    fleets = (
        "stand_fleet",
        "hosted",
        "wide",
        "ranks",
        "avoiding",
        "judge",
        "policy",
        "staged_fleet",
        "staged_stand",
        "staged_replicas",
        "staged_wide",
    )
    items.sort(
        key=lambda item: next((place for place, name in enumerate(fleets) if name in getattr(item, "fixturenames", ())), len(fleets))
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the state of the pods and the log of the operator to a failure, because both are gone when the report is read."""
    report = yield
    if report.failed and "kubectl" in getattr(item, "fixturenames", ()):
        report.sections.append((f"pods of {NAMESPACE}", _or_refusal(lambda: describe_pods(Kubectl(NAMESPACE)))))
        report.sections.append(("log of the operator", _or_refusal(read_operator_log)))
    return report


def _or_refusal(read: Callable[[], str]) -> str:
    """Return what ``read`` returns, or why the API server refused it: a report must not fail."""
    try:
        return read()
    except Refused as error:
        return str(error)


def read_operator_log() -> str:
    """Return the last 60 lines of the operator's log, with its restarts."""
    system = Kubectl(SYSTEM)
    return system("get", "pods") + system("logs", "deployment/sglang-rollout-operator", "--tail=60", "--timestamps")


def sample(name: str = NAME, **engine: Any) -> dict[str, Any]:
    """Return the example that users apply, with another name, other engine fields, and the token of this machine."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples/rollout-cpu.yaml").read_text())
    document["metadata"] |= {"name": name, "namespace": NAMESPACE}
    document["spec"]["engine"] |= engine
    document["spec"]["weights"] |= {"deadlines": {"groupSeconds": 20}}
    document["spec"]["security"] = machine_token.security()
    return document


def with_adapters(document: dict[str, Any]) -> dict[str, Any]:
    """Let the engines of a rollout load adapters. On a CPU, SGLang needs a patch for them (images/engine-cpu/README.md)."""
    engine = document["spec"]["engine"]
    engine["lora"] = {"maxRank": 4, "targetModules": ["q_proj", "v_proj"], "backend": "torch_native"}
    engine["env"] = [*engine["env"], {"name": "SGLANG_CPU_PATCHES", "value": "lora,paused-sleep"}]
    return document


@pytest.fixture(scope="session")
def kubectl() -> Kubectl:
    """Return kubectl for the namespace of the cases."""
    if not os.environ.get("KUBECONFIG") and os.environ.get("CLUSTER") != "current":
        pytest.skip("no cluster: run `make cluster-up` and `make test`, or name your own with CLUSTER=current")
    return Kubectl(NAMESPACE)


@pytest.fixture(scope="session")
def operator(kubectl: Kubectl) -> Kubectl:
    """Install the operator from the chart, and return kubectl for its namespace."""
    system = Kubectl(SYSTEM)
    install_operator(CASES_VALUES)
    try:
        kubectl("create", "namespace", NAMESPACE)
    except Refused as error:
        if "AlreadyExists" not in str(error):
            raise
    kubectl.apply(machine_token.secret())
    return system


def ready(kubectl: Kubectl, name: str = NAME) -> bool:
    """Return whether the rollout is Ready at its current generation."""
    rollout = kubectl.get("sglr", name)
    observed = rollout.get("status", {}).get("observedGeneration") == rollout["metadata"]["generation"]
    return observed and condition(rollout, "Ready")["status"] == "True"


@pytest.fixture(scope="session")
def fleet(kubectl: Kubectl, operator: Kubectl) -> Iterator[str]:
    """Create a rollout of two engines that load adapters and share a folder with the client, and return its name."""
    remove_stand(kubectl)
    remove(kubectl, NAME)
    kubectl.apply(with_adapters(stand_in.with_folder(sample())))
    eventually("the rollout is Ready", lambda: ready(kubectl), within=400, every=2)
    yield NAME
    remove(kubectl, NAME)


def remove(kubectl: Kubectl, name: str) -> None:
    """Delete a rollout and wait until its pods are gone."""
    kubectl("delete", "sglr", name, "--ignore-not-found", "--wait=false")
    selector = f"rollout.sglang.io/rollout={name}"
    eventually(f"the pods of {name} are gone", lambda: not kubectl.list("pods", selector), every=1)


@pytest.fixture
def url(kubectl: Kubectl, fleet: str) -> Iterator[str]:
    """Forward the fleet's URL to this machine. Each case has its own forward, because a forward ends with the process behind it."""
    with kubectl.forward(f"svc/{fleet}-router", 30000) as address:
        yield address


@pytest.fixture(scope="session")
def client(kubectl: Kubectl, operator: Kubectl) -> str:
    """Create a pod with torch and our client library, in the place of a trainer, and return its name."""
    return trainer_pod(kubectl, "client")


def trainer_pod(kubectl: Kubectl, name: str) -> str:
    """Create a pod in which trainers can be started, wait until it runs, and return its name."""
    kubectl.apply(stand_in.code())
    kubectl("delete", "pod", name, "--ignore-not-found", timeout=90)
    kubectl.apply(stand_in.trainer_pod(name))
    kubectl("wait", f"pod/{name}", "--for=condition=Ready", "--timeout=90s", timeout=120)
    return name


@pytest.fixture
def both_serve(kubectl: Kubectl, fleet: str, client: str, url: str) -> None:
    """Let both engines serve when the case begins, in whatever state the previous case left them."""
    if kubectl.get("sglr", fleet)["spec"]["replicas"] != 2:
        kubectl("scale", "sglr", fleet, "--replicas=2")

    def up() -> bool:
        seen = document(url)
        return len(seen["members"]) == 2 and all(member["state"] != "unknown" for member in seen["members"])

    eventually("both engines are up", up, within=300, every=2)
    if document(url)["serving"] != 2:
        push(kubectl, fleet, str(int(time.time())), seed=1)
    serving(url, 2)


@pytest.fixture(scope="session")
def stand_fleet(kubectl: Kubectl, operator: Kubectl) -> Iterator[str]:
    """Create a rollout of three stand-in engines that share a volume, and return its name. Its engines start in seconds."""
    remove(kubectl, NAME)  # left by an interrupted run
    remove(kubectl, "stand")
    kubectl.apply(stand_in.code())
    kubectl.apply(stand_in.rollout("stand"))
    trainer_pod(kubectl, "trainer")
    eventually("the rollout is Ready", lambda: ready(kubectl, "stand"), within=180, every=1)
    yield "stand"
    remove_stand(kubectl)


def remove_stand(kubectl: Kubectl) -> None:
    """Delete the stand-ins and the pod of their trainers, if they exist."""
    kubectl("delete", "pod", "trainer", "--ignore-not-found", "--wait=false")
    remove(kubectl, "stand")


@pytest.fixture
def stand(kubectl: Kubectl, stand_fleet: str, tmp_path: Path) -> Iterator[StandInRollout]:
    """Return the fleet of stand-ins, all of which serve when the case begins."""
    with kubectl.forward(f"svc/{stand_fleet}-router", 30000) as url:
        made = StandInRollout(kubectl, stand_fleet, url, 3, tmp_path)
        let_all_serve(made)
        yield made
        made.close()


@pytest.fixture
def watch(stand: StandInRollout) -> Iterator[Watch]:
    """Run clients that send requests all the time and check every answer by its tokens. A wrong answer fails the case."""
    trainer = stand.trainer()
    made = Watch(stand.url, {"base": trainer.base})
    stand.push(trainer, made)
    trainer.end()
    made.start(FEW, FEW, FEW)
    yield made
    eventually("the clients got answers", lambda: made.answers > 10)
    made.stop()
    assert made.violations == []
