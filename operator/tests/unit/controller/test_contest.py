"""Fights with other clients about a child: delays, the end of a fight, who fights, and what the status says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_rollout.controller.decide.contest import (
    FREE_RESTORES,
    LAST_DELAY_SECONDS,
    Restores,
    Rival,
    find_rival,
    note_apply,
    seconds_until_peace,
    seconds_until_restore,
)
from sglang_rollout.controller.decide.plan import Apply, make_plan
from sglang_rollout.controller.decide.status import build_status
from sglang_rollout.controller.decide.transitions import find_events
from sglang_rollout.controller.decide.view import FleetView
from sglang_rollout.controller.render.hashing import digest
from tests.unit.controller.support.worlds import NOW, SETTINGS, condition, pod, record, row, world

LATER = "2026-11-21T04:00:00Z"
ROUTER = ("Deployment", "demo-router")


def restored(times: int, rival: Rival | None = None) -> Restores:
    restores = note_apply(None, "a", NOW, None)
    for _ in range(times):
        restores = note_apply(restores, "a", NOW, rival)
    return restores


def test_delays_grow_and_have_a_limit() -> None:
    delays = [seconds_until_restore(restored(times), "a", NOW) for times in (0, 1, 2, FREE_RESTORES, 5, 8, 60)]
    assert delays == [0, 0, 0, 1, 4, 32, LAST_DELAY_SECONDS]


def test_new_desired_state_and_quiet_end_a_fight() -> None:
    fought = restored(9)
    assert seconds_until_restore(fought, "b", NOW) == 0, "a change of the spec is applied at once"
    assert note_apply(fought, "b", NOW, None).count == 0
    assert note_apply(fought, "a", LATER, None).count == 0
    assert seconds_until_peace({ROUTER: fought}, NOW) == 900
    assert seconds_until_peace({ROUTER: fought}, LATER) is None


def entry(manager: str, fields: dict[str, Any], time: str = NOW, **more: Any) -> dict[str, Any]:
    return {"manager": manager, "operation": "Update", "time": time, "fieldsV1": fields, **more}


WANTED = {"spec": {"replicas": 1, "template": {"spec": {"containers": [{"name": "front", "image": "a"}]}}, "args": ["x"]}}
CONTAINERS: dict[str, Any] = {"f:template": {"f:spec": {"f:containers": {'k:{"name":"front"}': {".": {}, "f:image": {}}}}}}


@pytest.mark.parametrize(
    ("entries", "live", "rival"),
    [
        ([entry("kubectl-edit", {"f:spec": {"f:replicas": {}}})], {"replicas": 5}, Rival("kubectl-edit", "spec.replicas")),
        (
            [entry("argocd", {"f:spec": CONTAINERS})],
            {"template": {"spec": {"containers": [{"name": "front", "image": "b"}]}}},
            Rival("argocd", "spec.template.spec.containers[front].image"),
        ),
        ([entry("flux", {"f:spec": {"f:args": {}}})], {"args": ["y"]}, Rival("flux", "spec.args")),
        # The field is gone and has no owner: the last writer is the best guess.
        ([entry("old", {}, "2026-11-20T03:00:00Z"), entry("remover", {})], {}, Rival("remover", "")),
        # Controllers write the status, and other clients own fields that the operator never sets.
        ([entry("kube-controller-manager", {"f:status": {}}, subresource="status")], {}, None),
        (
            [entry("mutator", {"f:spec": {"f:paused": {}}}, LATER), entry("editor", {"f:spec": {"f:replicas": {}}})],
            {"paused": True, "replicas": 2},
            Rival("editor", "spec.replicas"),
        ),
        ([entry("sglang-rollout-operator", {"f:spec": {"f:replicas": {}}})], {"replicas": 7}, None),
    ],
)
def test_rival_is_named_with_its_field(entries: list[dict[str, Any]], live: dict[str, Any], rival: Rival | None) -> None:
    assert find_rival(WANTED, {"metadata": {"managedFields": entries}, "spec": live}) == rival


def fought_world(restores: Restores | None = None) -> FleetView:
    seen = world([pod(0), pod(1)], written=record(row(0), row(1)))
    live = seen.children[ROUTER]
    changed = {**live, "metadata": {**live["metadata"], "annotations": {}}}
    found = replace(seen, children={**seen.children, ROUTER: changed})
    return replace(found, restores={ROUTER: restores}) if restores else found


def router_applies(seen: FleetView) -> list[Apply]:
    applies = [action for action in make_plan(seen, SETTINGS, NOW).actions if isinstance(action, Apply)]
    return [apply for apply in applies if (apply.object["kind"], apply.object["metadata"]["name"]) == ROUTER]


def test_contested_child_waits_and_the_others_do_not() -> None:
    (apply,) = router_applies(fought_world())
    fought = replace(restored(5), digest=digest(apply.object))
    assert router_applies(fought_world(fought)) == []
    plan = make_plan(fought_world(fought), SETTINGS, NOW)
    assert plan.actions, "uncontested children are applied"
    assert plan.requeue_after is not None
    assert plan.requeue_after <= 4


def test_fight_is_degraded_and_has_one_event() -> None:
    rival = Rival("argocd-controller", "spec.replicas")
    before = build_status(fought_world(), NOW)
    during = build_status(fought_world(restored(5, rival)), NOW)
    degraded = condition(during, "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "FieldsContested")
    assert "spec.replicas of Deployment demo-router" in degraded["message"]
    assert "argocd-controller" in degraded["message"]
    assert condition(during, "Ready")["status"] == "True"
    (event,) = find_events(before, during)
    assert (event.type, event.reason, event.message) == ("Warning", "FieldsContested", degraded["message"])
    assert find_events(during, build_status(fought_world(restored(6, rival)), NOW)) == []
    assert condition(build_status(fought_world(restored(5, rival)), LATER), "Degraded")["status"] == "False"
    unknown = condition(build_status(fought_world(restored(5)), NOW), "Degraded")
    assert "second operator" in unknown["message"]
