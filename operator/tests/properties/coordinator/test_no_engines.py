"""A fleet whose spec wants no engine names the fields of the spec, and does not ask for a repetition that cannot help."""

from __future__ import annotations

import pytest

from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.membership import describe_none_up, why_incomplete
from tests.properties.support.coordinator_world import World, group_body

CAUSE = "because spec.replicas is 0 or spec.state is Suspended"
CALLS: list[rq.Request] = [
    rq.Pause("abort", {"mode": "abort"}),
    rq.Flush(),
    rq.Continue(),
    rq.ReleaseMemory(()),
    rq.LoadAdapter("a", "/adapters/a"),
    rq.OpenGroup({"group_name": "g"}),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call).__name__)
def test_a_call_names_the_fields_that_stop_the_fleet(call: rq.Request) -> None:
    world = World([])
    world.settle()
    answer = world.do(call)
    assert answer.status == 503
    assert CAUSE in answer.message
    assert "Try again" not in answer.message
    assert "Change the spec." in answer.message


def test_engines_that_are_only_down_are_waited_for() -> None:
    world = World([1])
    assert describe_none_up(world.machine.fleet, "x") == "No engine of this fleet is up, so x. Try again."
    assert CAUSE not in why_incomplete(world.machine.fleet)
    assert "Try again" in world.do(rq.OpenGroup(group_body(world, "g"))).message
