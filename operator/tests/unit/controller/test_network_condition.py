"""The condition NetworkIsolated says whether the cluster enforces the NetworkPolicies, and what to do if not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.transitions import find_events
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.fleet_objects import intent
from sglang_rollout.wire.record import Isolation
from tests.unit.controller.support.worlds import Object, condition, cr, pod, record, row, status_of, world

OPEN: Object = {"security": {"network": "Open"}}
ON_NODE: Object = {"engine": {"image": "example.org/engine:1", "gpuResource": "", "network": {"hostNetwork": True}}}
OPEN_CONTROL: Object = {"security": {"control": "Open"}}
ROUTER: Object = {
    "metadata": {"name": "demo-router-0", "labels": names.labels("demo", names.COMPONENT_ROUTER)},
    "spec": {},
    "status": {"podIP": "10.20.3.4"},
}
ENFORCED = Isolation(checked=2)
REACHED = Isolation(checked=2, reached=["demo-engine-1"], reached_count=1)


def by_address(*blocks: str) -> Object:
    return {"security": {"trainers": {"cidrs": list(blocks)}}}


def status(isolation: Isolation | None, **spec: Any) -> Object:
    written = record(row(0), row(1)).model_copy(update={"isolation": isolation})
    return status_of(world([pod(0), pod(1), ROUTER], written=written, custom=cr(**spec)))


@pytest.mark.parametrize(
    ("isolation", "spec", "expected", "words"),
    [
        (ENFORCED, {}, ("True", "Enforced"), "2 of 2 engines failed"),
        (REACHED, {}, ("False", "NotEnforced"), "1 of 2 engines (demo-engine-1): the cluster's network plugin does not enforce"),
        (REACHED, {}, ("False", "NotEnforced"), "Install one that does, or set spec.security.network to Open."),
        (None, {}, ("Unknown", "NotReported"), "No engine is up"),
        (REACHED, OPEN, ("False", "NetworkOpen"), "creates no NetworkPolicies"),
        (None, ON_NODE, ("False", "HostNetwork"), "engine.network.hostNetwork"),
        (REACHED, OPEN_CONTROL, ("False", "NetworkOpen"), "spec.security.control is Open"),
        (REACHED, {**OPEN_CONTROL, "weights": {"transport": "Disk"}}, ("False", "NotEnforced"), "1 of 2 engines"),
        (REACHED, by_address("10.20.0.0/16"), ("False", "NetworkOpen"), "10.20.0.0/16 contains 10.20.3.4, the address of the router pod."),
        (REACHED, by_address("192.168.0.0/16", "1:2:3:4:5:6:7:8::/64"), ("False", "NotEnforced"), "1 of 2 engines"),
    ],
)
def test_the_condition(isolation: Isolation | None, spec: Object, expected: tuple[str, str], words: str) -> None:
    found = condition(status(isolation, **spec), "NetworkIsolated")
    assert (found["status"], found["reason"]) == expected
    assert words in found["message"]


def test_a_cluster_that_does_not_enforce_policies_keeps_the_fleet_ready() -> None:
    found = status(REACHED)
    assert condition(found, "Ready")["status"] == "True"
    assert condition(found, "Degraded")["status"] == "False"


def test_an_event_warns_once_that_policies_are_not_enforced() -> None:
    before, after = status(None), status(REACHED)
    events = [event for event in find_events(before, after) if event.reason == "NotEnforced"]
    assert [(event.type, event.message) for event in events] == [("Warning", condition(after, "NetworkIsolated")["message"])]
    assert find_events(after, after) == []
    assert [event for event in find_events(before, status(ENFORCED)) if event.reason == "NotEnforced"] == []


@pytest.mark.parametrize(("spec", "expected"), [({}, True), (OPEN, None), (ON_NODE, None)])
def test_the_coordinator_checks_only_if_policies_select_engines(spec: Object, expected: bool | None) -> None:
    made = intent(SGLangRollout.model_validate(cr(**spec)), {})
    assert json.loads(made["data"][names.INTENT_KEY]).get("isolated") is expected
