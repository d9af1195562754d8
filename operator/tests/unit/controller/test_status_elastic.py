"""What is said of a fleet with a base (``spec.elastic``): when it is ready, and of which engines that is no question."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.status import build_status
from sglang_rollout.controller.decide.transitions import find_events
from sglang_rollout.controller.decide.view import FleetView
from sglang_rollout.controller.render.hashing import revision
from tests.unit.controller.support.worlds import NOW, cr, crashed, partial, pod, record, row, unschedulable, waiting, world

Object = dict[str, Any]
FULL = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu"


def seen(*pods: Object, replicas: int = 3, rows: int = 3, router: bool = True, last: Any = None, **spec: Any) -> FleetView:
    """Two engines are the base, unless ``spec`` says otherwise."""
    written = record(*map(row, range(rows)), last=last)
    return world(list(pods), written=written, router=router, custom=cr(replicas, **{"elastic": {"base": 2}, **spec}))


def homeless(index: int) -> Object:
    made = pod(index, ready=False, status=unschedulable(FULL))
    made["spec"] = {}
    return made


def said(found: FleetView, kind: str = "Ready") -> tuple[str, str, str]:
    one = next(one for one in build_status(found, NOW)["conditions"] if one["type"] == kind)
    return one["status"], one["reason"], one["message"]


def test_it_is_ready_with_its_base_and_tells_who_waits() -> None:
    fleet = seen(pod(0), pod(1), homeless(2), rows=2)
    assert said(fleet) == (
        "True",
        "BaseServing",
        "All 2 engines of the base serve version base, and 0 of 1 surplus engines."
        " Engine demo-engine-2: no node can take its pod: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    )
    assert said(fleet, "Degraded")[0] == "False"
    status = build_status(fleet, NOW)
    assert (status["ready"], status["base"], status["readyReplicas"]) == ("2/3", 2, 2)
    assert [one["phase"] for one in status["engines"]] == ["Serving", "Serving", "Pending"]


@pytest.mark.parametrize(
    "coming",
    [
        pytest.param(homeless(2), id="waits for room"),
        pytest.param(pod(2, ready=False), id="starts"),
        pytest.param(pod(2), id="waits for weights"),
    ],
)
def test_an_engine_beyond_the_base_does_not_take_ready_away_when_it_comes(coming: Object) -> None:
    assert said(seen(pod(0), pod(1), coming, rows=2))[:2] == ("True", "BaseServing")


def test_with_all_engines_it_says_so() -> None:
    assert said(seen(pod(0), pod(1), pod(2)))[:2] == ("True", "AllServing")


@pytest.mark.parametrize("index", [0, 1])
def test_the_base_is_asked_for_whatever_the_others_do(index: int) -> None:
    there = [pod(other) for other in range(3) if other != index]
    assert said(seen(*there, homeless(index)))[:2] == ("False", "InsufficientCapacity")
    assert said(seen(*there, homeless(index)), "Degraded")[0] == "True"


def test_of_two_that_are_away_the_one_of_the_base_is_spoken_of() -> None:
    status, reason, message = said(seen(pod(0), pod(1, ready=False), homeless(2), rows=1))
    assert (status, reason, message) == ("False", "PodsNotReady", "Engine demo-engine-1: it is starting.")


@pytest.mark.parametrize(
    ("broken", "reason"), [(crashed(), "EngineCrashed"), (waiting("ErrImagePull", "not found"), "ImagePullFailed")], ids=["crash", "image"]
)
def test_a_failure_needs_a_person_wherever_it_is(broken: Object, reason: str) -> None:
    fleet = seen(pod(0), pod(1), pod(2, ready=False, status=broken), rows=2)
    assert said(fleet)[:2] == ("False", reason)
    assert said(fleet, "Degraded")[:2] == ("True", reason)


def test_a_partial_commit_is_told_also_of_an_engine_beyond_the_base() -> None:
    fleet = seen(pod(0), pod(1), pod(2), rows=2, last=partial("demo-engine-2: its session did not end"))
    assert said(fleet)[:2] == ("True", "BaseServing")
    assert said(fleet, "Degraded")[:2] == ("True", "PartlyCommitted")


def test_without_a_router_the_base_does_not_help() -> None:
    assert said(seen(pod(0), pod(1), homeless(2), router=False))[:2] == ("False", "RouterNotReady")


def test_several_that_wait_are_counted() -> None:
    fleet = seen(pod(0), pod(1), homeless(2), homeless(3), replicas=4, rows=2)
    assert said(fleet)[2].endswith("(1 more engine not serving either.)")


def test_an_engine_that_comes_after_the_base_says_so() -> None:
    fleet = seen(pod(0), homeless(1), rows=1)
    children = {key: child for key, child in fleet.children.items() if key != ("StatefulSet", "demo-engine-2")}
    last = build_status(replace(fleet, children=children), NOW)["engines"][2]
    assert (last["phase"], last["message"]) == ("Pending", "it is created when every engine of the base has a node.")
    status, reason, message = said(replace(fleet, children=children), "Progressing")
    assert (status, reason) == ("False", "InsufficientCapacity"), "nothing comes before there is room"
    assert message.startswith("Waiting: 2 of 3 engines. Engine demo-engine-1: no node can take its pod")


def test_suspended_and_scaled_to_zero_have_no_base() -> None:
    assert said(seen(replicas=0)) == ("True", "ScaledToZero", "No engine is wanted (spec.replicas is 0).")
    suspended = seen(state="Suspended")
    assert said(suspended)[:2] == ("False", "Suspended")
    assert build_status(suspended, NOW)["base"] == 0


def test_without_the_field_all_engines_are_asked_for_and_status_names_no_base() -> None:
    fleet = seen(pod(0), pod(1), homeless(2), elastic=None)
    assert said(fleet)[:2] == ("False", "InsufficientCapacity")
    assert "base" not in build_status(fleet, NOW)


def test_people_hear_when_the_base_is_up_and_when_all_are() -> None:
    starts = build_status(seen(pod(0), rows=1), NOW)
    base = build_status(seen(pod(0), pod(1), homeless(2), rows=2), NOW)
    whole = build_status(seen(pod(0), pod(1), pod(2)), NOW)
    ready = [[event.message for event in find_events(old, new) if event.reason == "Ready"] for old, new in [(starts, base), (base, whole)]]
    assert [len(messages) for messages in ready] == [1, 1]
    assert ready[0][0].startswith("All 2 engines of the base serve")


def test_a_field_of_later_releases_changes_no_revision() -> None:
    """Else an upgrade of the operator would restart fleets that do not use it."""
    plain, elastic = (SGLangRollout.model_validate(cr(3, **more)) for more in ({}, {"elastic": {"base": 1}}))
    assert {revision(plain), *(revision(elastic, index) for index in range(3))} == {revision(plain)}
