"""One trainer at a time holds a fleet: another allowed trainer waits for the end of its lease, or takes the fleet over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.coordinator.update import events as ev
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.lease import seconds_left
from sglang_rollout.wire.states import FleetMode
from tests.properties.support.coordinator_world import World, group_body

ANNE, BEN = "ml/Job/anne", "ml/Job/ben"


def make() -> World:
    """Two engines, and an open group of Anne."""
    world = World([1, 1])
    world.sync_all()
    assert world.do(rq.OpenGroup(group_body(world, "g")), ANNE).success
    return world


def test_another_trainer_is_refused_until_the_lease_has_expired() -> None:
    world = make()
    refused = world.do(rq.Begin(), BEN)
    assert refused.status == 409
    assert f"Another trainer holds this fleet: {ANNE}." in refused.message
    assert refused.fleet["expires_in"] == 20.0
    world.tick(19)
    assert not world.do(rq.Begin(), BEN).success
    world.tick(2)
    assert world.do(rq.Pause("retract"), BEN).success
    assert world.machine.fleet.holder == BEN
    assert world.do(rq.Pause("retract"), ANNE).status == 409, "the fleet is Ben's now"


def test_a_holder_without_pods_has_no_lease() -> None:
    world = make()
    assert world.do(rq.Begin(), ANNE).success
    world.gone = "ml/Job/other"
    assert world.do(rq.Begin(), BEN).status == 409
    world.gone = ANNE
    assert world.do(rq.OpenGroup(group_body(world, "h")), BEN).success
    assert world.machine.fleet.holder == BEN
    assert world.do(rq.Begin(), "ml/Job/eve").status == 409, "Ben has pods"


def test_heartbeats_keep_the_lease() -> None:
    world = make()
    for _ in range(5):
        world.tick(15)
        world.feed(ev.Beat(world.now))
    assert world.do(rq.Begin(), BEN).status == 409


def test_a_refused_call_keeps_no_lease_alive() -> None:
    world = make()
    for _ in range(2):
        world.tick(9)
        assert not world.do(rq.Begin(), BEN).success
    world.tick(3)
    assert world.do(rq.NewRun(), BEN).success


def test_a_fleet_with_nothing_open_admits_every_trainer() -> None:
    world = make()
    assert world.do(rq.CloseGroup("g"), ANNE).success
    assert world.do(rq.Pause("retract"), BEN).success
    assert world.machine.fleet.holder == BEN


@pytest.mark.parametrize("request_", [rq.Flush(), rq.NewRun(), rq.Continue(), rq.End(), rq.CloseGroup("unknown")])
def test_a_call_that_opens_nothing_takes_no_fleet(request_: rq.Request) -> None:
    world = make()
    world.tick(600)
    world.do(request_, BEN)
    assert world.machine.fleet.holder == ANNE
    assert world.do(rq.Begin(), ANNE).success
    assert world.do(request_, BEN).status == 409


def test_a_refused_call_takes_no_fleet() -> None:
    world = make()
    world.tick(600)
    assert world.do(rq.OpenGroup({**group_body(world, "h"), "world_size": 7}), BEN).status == 400
    assert world.machine.fleet.holder == ANNE
    assert world.do(rq.OpenGroup(group_body(world, "h")), BEN).success, "the refused call renewed no lease"


def test_the_trainer_of_an_open_group_is_allowed_while_another_has_no_update_and_no_pause() -> None:
    world = make()
    world.tick(600)
    assert world.do(rq.OpenGroup(group_body(world, "h")), BEN).success
    assert world.machine.fleet.holder == BEN
    assert world.do(rq.Begin(), ANNE).success
    assert world.machine.fleet.holder == ANNE
    assert world.do(rq.Begin(), BEN).status == 409
    assert world.do(rq.Update("g", "1", {"names": ["w"]}), ANNE).success
    assert world.do(rq.End(), ANNE).success
    assert world.do(rq.Pause("retract"), BEN).success
    assert world.do(rq.Begin(), ANNE).status == 409


def test_a_call_that_waited_is_refused_if_another_trainer_took_the_fleet_meanwhile() -> None:
    world = make()
    world.tick(600)
    assert world.do(rq.CloseGroup("g"), ANNE).success
    first, second = world.ask(rq.Pause("retract"), ANNE), world.ask(rq.Pause("retract"), BEN)
    world.drain()
    assert [world.answers[call].status for call in (first, second)] == [200, 409]


def test_calls_of_others_keep_no_dead_trainer_alive() -> None:
    world = make()
    world.tick(21)
    assert world.do(rq.Flush(), BEN).success
    assert world.do(rq.OpenGroup(group_body(world, "h")), BEN).success


def test_a_restarted_coordinator_knows_the_holder_and_the_trainers_of_groups() -> None:
    world = make()
    world.start()
    world.sync_all()
    assert world.machine.fleet.holder == ANNE
    assert world.do(rq.Flush(), BEN).status == 409
    world.tick(21)
    assert world.do(rq.OpenGroup(group_body(world, "h")), BEN).success
    assert world.do(rq.Begin(), ANNE).success


def test_a_trainer_takes_the_fleet_over_and_the_open_update_ends() -> None:
    world = make()
    assert world.do(rq.Begin(), ANNE).success
    assert world.do(rq.Claim(), BEN).status == 409
    assert world.do(rq.Claim(take_over=True), BEN).success
    assert world.machine.fleet.update is None
    assert world.machine.fleet.holder == BEN
    assert world.machine.fleet.last_update is not None
    assert world.machine.fleet.last_update.author == ANNE, "the update was Anne's"
    assert world.do(rq.End(), ANNE).status == 409
    assert world.do(rq.Begin(), ANNE).status == 409, "Ben has the process group, too"


@pytest.mark.parametrize("take_over", [False, True])
def test_a_claim_of_the_holder_changes_nothing(take_over: bool) -> None:
    world = make()
    assert world.do(rq.Begin(), ANNE).success
    assert world.do(rq.Claim(take_over), ANNE).success
    assert world.machine.fleet.update is not None


def test_a_claim_after_the_end_of_the_lease_aborts_the_open_update() -> None:
    world = make()
    assert world.do(rq.Begin(), ANNE).success
    world.tick(21)
    assert world.do(rq.Claim(), BEN).success
    assert world.machine.fleet.update is None
    assert world.do(rq.Begin(), BEN).success


def test_a_commit_names_its_author() -> None:
    world = make()
    assert world.do(rq.Begin(), ANNE).success
    assert world.do(rq.Update("g", "1", {"names": ["w"]}), ANNE).success
    assert world.do(rq.End(), ANNE).success
    record = world.machine.fleet.record()
    assert record is not None
    assert record.last_update is not None
    assert record.last_update.author == ANNE


def make_shared(mode: FleetMode) -> World:
    """Two engines on the GPUs of Anne, who has all of their memory again after it was with the engines."""
    world = World([1, 1])
    world.mode = mode
    world.send_intent()
    world.settle()
    assert world.do(rq.ResumeMemory(()), BEN).success, "no trainer holds a new fleet"
    assert world.machine.fleet.holder == ""
    assert world.do(rq.ReleaseMemory(()), ANNE).success
    assert world.machine.fleet.holder == ANNE
    return world


def make_asleep() -> World:
    """Two engines with GPUs of their own, whose memory Anne has released."""
    world = World([1, 1])
    world.sync_all()
    assert world.do(rq.ReleaseMemory(()), ANNE).success
    return world


MAKERS = {
    "Colocated": lambda: make_shared(FleetMode.COLOCATED),
    "Hybrid": lambda: make_shared(FleetMode.HYBRID),
    "Standalone": make_asleep,
}


@pytest.mark.parametrize("mode", MAKERS)
def test_released_memory_is_the_holders_while_its_pods_live(mode: str) -> None:
    world = MAKERS[mode]()
    for _ in range(2):
        for _ in range(10):
            world.tick(600)
            world.sync_all()
        refused = world.do(rq.ResumeMemory(()), BEN)
        assert refused.status == 409, refused
        assert "while its pods live" in refused.message
        assert "expires_in" not in refused.fleet
        world.start()
        world.settle()
    world.gone = ANNE
    assert world.do(rq.ResumeMemory(()), BEN).success


@pytest.mark.parametrize("mode", MAKERS)
def test_memory_that_is_back_holds_no_fleet(mode: str) -> None:
    world = MAKERS[mode]()
    assert world.do(rq.ResumeMemory(()), ANNE).success
    world.settle()
    assert world.do(rq.ReleaseMemory(()), BEN).success
    assert world.machine.fleet.holder == BEN


def test_memory_that_is_released_at_one_engine_holds_the_fleet() -> None:
    world = make_shared(FleetMode.COLOCATED)
    assert world.do(rq.AtEngine("e0", rq.ResumeMemory(())), ANNE).success
    world.settle()
    world.tick(600)
    assert world.do(rq.AtEngine("e1", rq.ResumeMemory(())), BEN).status == 409


def test_a_holder_that_is_no_pod_keeps_released_memory_for_the_longest_time_of_a_step() -> None:
    world = World([1, 1])
    world.sync_all()
    assert world.do(rq.ReleaseMemory(()), "10.0.0.9").success
    world.tick(1700)
    refused = world.do(rq.ResumeMemory(()), BEN)
    assert (refused.status, round(refused.fleet["expires_in"])) == (409, 100)
    world.tick(200)
    assert world.do(rq.ResumeMemory(()), BEN).success


def test_the_trainer_of_another_group_does_not_return_while_memory_is_released() -> None:
    world = make()
    world.tick(600)
    world.drain()
    assert world.do(rq.ReleaseMemory(()), BEN).success
    assert world.do(rq.ResumeMemory(()), ANNE).status == 409
    assert world.do(rq.Claim(take_over=True), ANNE).success
    assert world.do(rq.ResumeMemory(()), ANNE).success


OPENING = [rq.Begin(), rq.Pause("retract"), rq.Claim()]
REQUESTS = st.sampled_from([*OPENING, rq.Continue(), rq.End(), rq.Flush(), rq.NewRun(), rq.CloseGroup("g")])
STEPS = st.tuples(st.sampled_from([ANNE, BEN]), REQUESTS, st.sampled_from([0.0, 1.0, 19.0, 21.0]))


@given(st.lists(STEPS, max_size=10))
def test_the_holder_changes_only_by_an_accepted_call_that_opens_something(steps: list[tuple[str, rq.Request, float]]) -> None:
    world = make()
    for caller, request, seconds in steps:
        world.tick(seconds)
        world.drain()
        fleet, before = world.machine.fleet, world.machine.fleet.holder
        left = seconds_left(fleet, world.machine._trainer)
        is_busy = fleet.update is not None or fleet.pause is not None
        owns_group = any(group.author == caller for group in fleet.groups.values())
        answer = world.do(request, caller)
        if fleet.holder != before:
            assert fleet.holder == caller
            assert request in OPENING
            assert left == 0 or (owns_group and not is_busy)
        if caller != before and left > 0 and not (owns_group and not is_busy):
            assert answer.status == 409


@given(
    st.lists(
        st.tuples(REQUESTS.filter(lambda request: request not in OPENING and request != rq.CloseGroup("g")), st.sampled_from([1.0, 30.0]))
    )
)
def test_calls_of_another_trainer_that_open_nothing_cost_the_trainer_no_call(steps: list[tuple[rq.Request, float]]) -> None:
    world = make()
    for request, seconds in steps:
        world.tick(seconds)
        world.do(request, BEN)
        assert world.do(rq.NewRun(), ANNE).success
