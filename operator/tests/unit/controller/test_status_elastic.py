"""The status of a fleet with a base (``spec.elastic``): surplus engines do not affect ``Ready``."""

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
    """Return a fleet with a base of two engines, unless ``spec`` has another base."""
    written = record(*map(row, range(rows)), last=last)
    return world(list(pods), written=written, router=router, custom=cr(replicas, **{"elastic": {"base": 2}, **spec}))


def homeless(index: int) -> Object:
    made = pod(index, ready=False, status=unschedulable(FULL))
    made["spec"] = {}
    return made


def said(found: FleetView, kind: str = "Ready") -> tuple[str, str, str]:
    one = next(one for one in build_status(found, NOW)["conditions"] if one["type"] == kind)
    return one["status"], one["reason"], one["message"]


def test_fleet_is_ready_with_its_base_and_names_a_waiting_engine() -> None:
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
def test_starting_surplus_engine_does_not_end_ready(coming: Object) -> None:
    assert said(seen(pod(0), pod(1), coming, rows=2))[:2] == ("True", "BaseServing")


def test_all_engines_serving() -> None:
    assert said(seen(pod(0), pod(1), pod(2)))[:2] == ("True", "AllServing")


@pytest.mark.parametrize("index", [0, 1])
def test_missing_base_engine_ends_ready(index: int) -> None:
    there = [pod(other) for other in range(3) if other != index]
    assert said(seen(*there, homeless(index)))[:2] == ("False", "InsufficientCapacity")
    assert said(seen(*there, homeless(index)), "Degraded")[0] == "True"


def test_base_engine_is_described_before_a_surplus_engine() -> None:
    status, reason, message = said(seen(pod(0), pod(1, ready=False), homeless(2), rows=1))
    assert (status, reason, message) == ("False", "PodsNotReady", "Engine demo-engine-1: it is starting.")


@pytest.mark.parametrize(
    ("broken", "reason"), [(crashed(), "EngineCrashed"), (waiting("ErrImagePull", "not found"), "ImagePullFailed")], ids=["crash", "image"]
)
def test_failed_surplus_engine_degrades_the_fleet(broken: Object, reason: str) -> None:
    fleet = seen(pod(0), pod(1), pod(2, ready=False, status=broken), rows=2)
    assert said(fleet)[:2] == ("False", reason)
    assert said(fleet, "Degraded")[:2] == ("True", reason)


def test_partial_commit_without_a_surplus_engine_is_reported() -> None:
    fleet = seen(pod(0), pod(1), pod(2), rows=2, last=partial("demo-engine-2: its session did not end"))
    assert said(fleet)[:2] == ("True", "BaseServing")
    assert said(fleet, "Degraded")[:2] == ("True", "PartlyCommitted")


def test_base_without_a_router_is_not_ready() -> None:
    assert said(seen(pod(0), pod(1), homeless(2), router=False))[:2] == ("False", "RouterNotReady")


def test_waiting_surplus_engines_are_counted() -> None:
    fleet = seen(pod(0), pod(1), homeless(2), homeless(3), replicas=4, rows=2)
    assert said(fleet)[2].endswith("(1 more engine not serving either.)")


def test_surplus_engine_that_waits_for_the_base_is_pending() -> None:
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


def test_all_engines_are_needed_without_the_field() -> None:
    fleet = seen(pod(0), pod(1), homeless(2), elastic=None)
    assert said(fleet)[:2] == ("False", "InsufficientCapacity")
    assert "base" not in build_status(fleet, NOW)


def test_events_when_the_base_and_when_all_engines_serve() -> None:
    starts = build_status(seen(pod(0), rows=1), NOW)
    base = build_status(seen(pod(0), pod(1), homeless(2), rows=2), NOW)
    whole = build_status(seen(pod(0), pod(1), pod(2)), NOW)
    ready = [[event.message for event in find_events(old, new) if event.reason == "Ready"] for old, new in [(starts, base), (base, whole)]]
    assert [len(messages) for messages in ready] == [1, 1]
    assert ready[0][0].startswith("All 2 engines of the base serve")


def test_a_field_of_later_releases_changes_no_revision() -> None:
    """Otherwise an upgrade of the operator would restart fleets that do not use the field."""
    plain, elastic = (SGLangRollout.model_validate(cr(3, **more)) for more in ({}, {"elastic": {"base": 1}}))
    assert {revision(plain), *(revision(elastic, index) for index in range(3))} == {revision(plain)}
