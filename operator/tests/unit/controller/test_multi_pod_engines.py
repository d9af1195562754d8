"""An engine with several pods is one unit in the status and in a rolling update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.drift import stamp
from sglang_rollout.controller.decide.plan import Delete, make_plan
from sglang_rollout.controller.decide.status import build_status
from sglang_rollout.controller.decide.view import FleetView
from sglang_rollout.controller.render import names, render_all
from sglang_rollout.controller.render.hashing import revision
from sglang_rollout.wire.agent import termination_message
from sglang_rollout.wire.reasons import GateReason, Refusal
from tests.unit.controller.support.worlds import NOW, SETTINGS, Object, cr, crashed, record, row, unschedulable, world

ENGINE = {"image": "example.org/engine:1", "gpuResource": "", "nodes": 2, "parallelism": {"tensor": 2}}
CR = cr(engine=ENGINE)


def pod(index: int, rank: int, *, ready: bool = True, current: str | None = None, restarts: int = 0, **more: Any) -> Object:
    engine = names.engine_name("demo", index)
    status = {
        "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        "containerStatuses": [{"name": "engine", "ready": ready, "started": True, "restartCount": restarts, "state": {"running": {}}}],
    }
    labels = {names.LABEL_REVISION: current or revision(SGLangRollout.model_validate(CR))}
    metadata = {"name": names.engine_pod(engine, rank), "uid": f"uid-{index}-{rank}", "labels": labels}
    return {"metadata": metadata, "spec": {"nodeName": f"node-{rank}"}, "status": {**status, **more}}


def fleet(*pods: Object, gates: tuple[bool, bool] = (True, True), closed: Refusal | None = None, custom: Object = CR) -> FleetView:
    rows = [row(index, gate=gates[index], closed=None if gates[index] else closed) for index in range(2)]
    return world(list(pods), written=record(*rows), custom=custom)


def engines(seen: FleetView) -> list[Object]:
    found: list[Object] = build_status(seen, NOW)["engines"]
    return found


def ready(seen: FleetView) -> Object:
    found: Object = next(one for one in build_status(seen, NOW)["conditions"] if one["type"] == "Ready")
    return found


def test_engine_serves_if_all_its_pods_are_ready() -> None:
    all_pods = [pod(index, rank, restarts=rank + 1) for index in range(2) for rank in range(2)]
    status = build_status(fleet(*all_pods), NOW)
    assert status["ready"] == "2/2"
    assert status["replicas"] == 2, "engines, not pods"
    assert status["engines"][0]["nodes"] == ["node-0", "node-1"]
    assert status["engines"][0]["restarts"] == 3
    assert status["selector"].endswith("rollout.sglang.io/rollout=demo")
    assert "apps.kubernetes.io/pod-index=0" in status["selector"], "an autoscaler counts engines"
    missing = fleet(*all_pods[:3])
    assert [engine["phase"] for engine in engines(missing)] == ["Serving", "Pending"]
    assert "it has 1 of 2 pods yet" in ready(missing)["message"]


def test_failing_pod_is_named_with_its_node() -> None:
    bad = {**pod(1, 1, ready=False), "status": {**crashed(message="CUDA out of memory")}}
    seen = fleet(pod(0, 0), pod(0, 1), pod(1, 0, ready=False), bad, gates=(True, False))
    assert ready(seen)["reason"] == "EngineCrashed"
    assert "Engine demo-engine-1: pod demo-engine-1-1 on node node-1: container engine exited" in ready(seen)["message"]


def test_status_names_the_pod_that_failed_first() -> None:
    log = "loading\nKilled\n" + termination_message("This pod restarts with the other pods of its engine: pod demo-engine-1-1 has ended.")
    ended = {**pod(1, 0, ready=False), "status": crashed(code=137, message=log)}
    cause = {**pod(1, 1, ready=False), "status": crashed(message="ValueError: no such backend")}
    seen = fleet(pod(0, 0), pod(0, 1), ended, cause, gates=(True, False))
    assert "ValueError: no such backend" in ready(seen)["message"]
    alone = fleet(pod(0, 0), pod(0, 1), ended, pod(1, 1), gates=(True, False))
    assert "pod demo-engine-1-1 has ended" in ready(alone)["message"], "the agent's line, not the shell's"


def test_unschedulable_pod_is_named() -> None:
    nowhere = {**pod(1, 1), "spec": {}, "status": unschedulable("0/3 nodes are available")}
    seen = fleet(pod(0, 0), pod(0, 1), pod(1, 0, ready=False), nowhere, gates=(True, False))
    assert ready(seen)["reason"] == "InsufficientCapacity"
    assert "pod demo-engine-1-1: no node can take its pod" in ready(seen)["message"]


def test_status_has_the_message_of_the_agents() -> None:
    closed = Refusal(
        GateReason.GROUP_RESTART, "The engine is not up: it waits until all 2 pods can start together, now for demo-engine-1-1."
    )
    seen = fleet(pod(0, 0), pod(0, 1), pod(1, 0, ready=False), pod(1, 1, ready=False), gates=(True, False), closed=closed)
    assert engines(seen)[1]["phase"] == "Starting"
    assert "now for demo-engine-1-1" in engines(seen)[1]["message"]


def test_exhausted_restart_budget_degrades_the_fleet() -> None:
    closed = Refusal(GateReason.RESTART_BUDGET_EXHAUSTED, "The engine is not up: 10 starts in a row failed. Delete its pods.")
    seen = fleet(pod(0, 0), pod(0, 1), pod(1, 0, ready=False), pod(1, 1, ready=False), gates=(True, False), closed=closed)
    assert ready(seen)["reason"] == "RestartBudgetExhausted"
    assert "Delete its pods" in ready(seen)["message"]
    assert engines(seen)[1]["phase"] == "Failed"


@pytest.mark.parametrize("earlier", [0, 1])
def test_pods_of_one_engine_with_different_credentials_do_not_stay_together(earlier: int) -> None:
    def made(index: int, rank: int, *, mounts_key: bool) -> Object:
        found = pod(index, rank)
        found["metadata"]["labels"][names.LABEL_ROLLOUT] = "demo"
        found["spec"]["volumes"] = [{"name": "control", "secret": {"secretName": "demo-control" if mounts_key else "demo-credentials"}}]
        return found

    mixed = [made(index, rank, mounts_key=(index, rank) != (1, 1 - earlier)) for index in range(2) for rank in range(2)]
    assert rolled(fleet(*mixed)) == {f"demo-engine-1-{earlier}"}, "the engine of equal pods keeps running"
    assert rolled(fleet(*(made(index, rank, mounts_key=False) for index in range(2) for rank in range(2)))) == set()


@pytest.mark.parametrize("old_rank", [0, 1])
def test_engine_is_outdated_if_one_pod_is(old_rank: int) -> None:
    pods = [pod(index, rank, current="old" if (index, rank) == (1, old_rank) else None) for index in range(2) for rank in range(2)]
    seen = fleet(*pods)
    assert [engine["updated"] for engine in engines(seen)] == [True, False]
    assert rolled(seen) == {f"demo-engine-1-{old_rank}"}


def test_rolling_update_deletes_all_pods_of_one_engine_at_a_time() -> None:
    old = [pod(index, rank, current="old") for index in range(2) for rank in range(2)]
    assert rolled(fleet(*old)) == {"demo-engine-1-0", "demo-engine-1-1"}
    assert rolled(fleet(*old, gates=(False, True))) == {"demo-engine-0-0", "demo-engine-0-1"}, "the one that does not serve goes first"
    assert rolled(fleet(*old, gates=(False, False))) == set()


def test_engine_with_another_number_of_pods_is_recreated_in_its_turn() -> None:
    old = [pod(index, rank, current="old") for index in range(2) for rank in range(2)]
    seen = fleet(*old)
    wanted = cr(engine={**ENGINE, "nodes": 1})
    resized = replace(applied(seen), cr=wanted, rollout=SGLangRollout.model_validate(wanted))
    made = make_plan(resized, SETTINGS).actions
    assert [(one.kind, one.name) for one in made if isinstance(one, Delete)] == [("StatefulSet", "demo-engine-1")]
    assert not [one for one in made if not isinstance(one, Delete) and one.object["kind"] == "StatefulSet"], "never resized in place"


def applied(seen: FleetView) -> FleetView:
    """Return the fleet after all children were applied and their controllers have seen them."""
    rendered = [stamp(one) for one in render_all(SGLangRollout.model_validate(CR), SETTINGS, token="t0ken")]
    children: dict[tuple[str, str], Object] = {}
    for made in rendered:
        key = (made["kind"], made["metadata"]["name"])
        live = {**seen.children[key], **made, "status": {**seen.children[key].get("status", {}), "observedGeneration": 1}}
        live["metadata"] = {**made["metadata"], "generation": 1, "uid": f"uid-{key[1]}"}
        children[key] = live
    return replace(seen, children=children)


def rolled(seen: FleetView) -> set[str]:
    return {one.name for one in make_plan(applied(seen), SETTINGS).actions if isinstance(one, Delete)}


def test_status_names_the_pod_that_cannot_reach_pod_0() -> None:
    words = "demo-engine-1-1 (it cannot reach pod 0: demo-engine-1-0.demo-engines: Name or service not known)"
    closed = Refusal(GateReason.GROUP_RESTART, f"it waits until all 2 pods can start together, now for {words}")
    starting = [pod(1, rank, ready=False) for rank in range(2)]
    shown = engines(fleet(pod(0, 0), pod(0, 1), *starting, gates=(True, False), closed=closed))[1]
    assert shown["message"].endswith(f"now for {words}.")


@pytest.mark.parametrize("there", [0, 1])
def test_engines_whose_pods_cannot_be_created_are_recreated_at_once(there: int) -> None:
    """No engine serves, so nothing is lost, and no engine has to wait for another."""
    pods = [pod(index, 0, current="old") for index in range(2)][: 2 * there]
    seen = applied(fleet(*pods, gates=(False, False)))
    wanted = cr(engine={**ENGINE, "nodes": 1})
    resized = replace(seen, cr=wanted, rollout=SGLangRollout.model_validate(wanted))
    made = make_plan(resized, SETTINGS)
    deleted = [one.name for one in made.actions if isinstance(one, Delete) and one.kind == "StatefulSet"]
    assert deleted == ["demo-engine-0", "demo-engine-1"]


def test_engine_without_all_its_pods_is_restarted_first() -> None:
    seen = fleet(pod(0, 0, current="old"), pod(0, 1, current="old"), pod(1, 0, current="old"), gates=(True, False))
    assert rolled(seen) == {"demo-engine-1-0"}
    both = fleet(pod(0, 0, current="old"), pod(1, 0, current="old"), gates=(False, False))
    assert rolled(both) == {"demo-engine-0-0", "demo-engine-1-0"}


def deletes(custom: Object, *pods: Object) -> set[str]:
    """Return kind and name of the deletes of a rollout whose children were made for two engines of two pods."""
    seen = fleet(*pods)
    changed = replace(seen, cr=custom, rollout=SGLangRollout.model_validate(custom))
    return {f"{action.kind} {action.name}" for action in make_plan(changed, SETTINGS).actions if isinstance(action, Delete)}


ALL_PODS = [pod(index, rank) for index in range(2) for rank in range(2)]


def test_the_policy_of_an_engine_stays_until_its_pods_have_ended() -> None:
    fewer = cr(replicas=1, engine=ENGINE)
    assert deletes(fewer, *ALL_PODS) == {"StatefulSet demo-engine-1"}
    assert deletes(fewer, *ALL_PODS[:2]) == {"StatefulSet demo-engine-1", "NetworkPolicy demo-engine-1"}


def test_the_policy_of_an_engine_stays_until_a_rolling_update_has_recreated_it() -> None:
    narrow = cr(engine={**ENGINE, "nodes": 1})
    assert not any("NetworkPolicy" in line for line in deletes(narrow, *ALL_PODS))
    rolled = [pod(0, 0), *ALL_PODS[2:]]
    assert {line for line in deletes(narrow, *rolled) if "NetworkPolicy" in line} == {"NetworkPolicy demo-engine-0"}


def test_an_open_network_removes_all_policies_at_once() -> None:
    """The policy of one engine alone would isolate its pods from every other source."""
    found = deletes({**CR, "spec": {**CR["spec"], "security": {"network": "Open"}}}, *ALL_PODS)
    assert found == {f"NetworkPolicy {name}" for name in ("demo-router", "demo-engines", "demo-engine-0", "demo-engine-1")}
