"""Transport Staged with engines of several pods and of several replicas: restarts return to the committed version.

The replicas are those of a stand-in. The engine of two pods is a real SGLang, which needs minutes on two cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e import stand_in
from e2e.cases.actions import KILL, document, forward, generate, push, serving
from e2e.cases.conftest import NAME, remove, remove_stand, trainer_pod
from e2e.cases.ranks import checksums, two_ranks
from e2e.cases.stand_in_rollout import StandInRollout
from e2e.cases.test_nodes import apart
from e2e.cases.test_staged import WEIGHTS, check_answers, fleet_of, uid
from e2e.chaos.tokens import FEW
from e2e.chaos.watch import Watch
from e2e.kube import Kubectl, eventually

WIDE, REPLICAS = "wide-copies", "replicas"
ENGINE = f"{WIDE}-engine-0"
TINY = "/models/tiny"


@pytest.fixture
def staged_replicas(kubectl: Kubectl, operator: Kubectl, tmp_path: Path) -> Iterator[StandInRollout]:
    """Create a rollout of one stand-in with two data-parallel replicas."""
    remove_stand(kubectl)
    remove(kubectl, NAME)
    trainer_pod(kubectl, "trainer")
    rollout = stand_in.rollout(REPLICAS, replicas=1, weights=WEIGHTS)
    rollout["spec"]["engine"]["parallelism"] = {"data": 2}
    with fleet_of(kubectl, rollout) as name, kubectl.forward(f"svc/{name}-router", 30000) as url:
        made = StandInRollout(kubectl, name, url, 1, tmp_path)
        yield made
        made.close()
    kubectl("delete", "pod", "trainer", "--ignore-not-found", "--wait=false")


@pytest.fixture
def staged_wide(kubectl: Kubectl, operator: Kubectl, client: str) -> Iterator[str]:
    """Create a rollout of one SGLang engine with two pods on two nodes."""
    remove_stand(kubectl)
    remove(kubectl, NAME)
    rollout = two_ranks(WIDE, nodes=2)
    rollout["spec"]["weights"] |= WEIGHTS
    rollout["spec"]["scheduling"] = apart(WIDE)
    with fleet_of(kubectl, rollout, within=600) as name:
        yield name


def test_an_engine_with_replicas_is_killed_and_serves_its_version_again(kubectl: Kubectl, staged_replicas: StandInRollout) -> None:
    fleet, pod = staged_replicas, f"{staged_replicas.engine(0)}-0"
    watch = Watch(fleet.url, {})
    trainer = fleet.trainer()
    for _ in range(2):
        fleet.push(trainer, watch)
    watch.start(FEW)
    before, committed = uid(kubectl, pod), document(fleet.url)["committed"]
    assert fleet.ask(0, "GET", "/server_info")["dp_size"] == 2
    kubectl.exec(pod, "sh", "-c", KILL, container="engine")
    fleet.serve(0)
    fleet.serve(1)
    assert document(fleet.url)["committed"] == committed
    assert uid(kubectl, pod) == before
    check_answers(watch)


@pytest.mark.two_nodes
def test_a_new_pod_of_an_engine_of_two_pods_copies_the_version_from_the_other_pod(kubectl: Kubectl, staged_wide: str) -> None:
    with kubectl.forward(f"svc/{staged_wide}-router", 30000) as url:
        push(kubectl, staged_wide, "1", seed=1)
        push(kubectl, staged_wide, "2", seed=2)
        right, pushed, committed = forward(kubectl, TINY, 2), checksums(kubectl, ENGINE), document(url)["committed"]
        assert generate(url).json()["output_ids"] == right
        before = [uid(kubectl, f"{ENGINE}-{rank}") for rank in (0, 1)]
        kubectl("delete", "pod", f"{ENGINE}-1", "--grace-period=1", "--wait=false")
        eventually("the engine is fenced", lambda: not document(url)["members"][0]["gate_open"])
        serving(url, 1, within=600)
        assert document(url)["committed"] == committed
        after = [uid(kubectl, f"{ENGINE}-{rank}") for rank in (0, 1)]
        assert (after[0] == before[0], after[1] == before[1]) == (True, False)
        assert checksums(kubectl, ENGINE) == pushed
        answer = eventually("the fleet answers", lambda: generate(url).json()["output_ids"])
        assert answer == right
    assert "lacks the committed version, so it copies it from this pod" in kubectl("logs", f"{ENGINE}-0", "-c", "agent")
