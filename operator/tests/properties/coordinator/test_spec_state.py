"""`spec.state` over the state machine: what a trainer sees of a fleet that its spec pauses, and what ends the pause."""

from __future__ import annotations

import pytest

from sglang_rollout.api.weights_spec import CatchUp
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.ports import AGENT_FENCE, AGENT_SYNC
from sglang_rollout.wire.states import FleetState, Version
from tests.properties.support.coordinator_world import SNAPSHOTS, World, group_body, push
from tests.properties.support.simulated_agent import SimulatedAgent

TENSORS = {"names": ["w"]}


def make(state: FleetState = FleetState.PAUSED, *, engines: int = 2) -> World:
    """Return a fleet that serves version 1 and is then paused or put to sleep."""
    world = World([1] * engines)
    world.sync_all()
    push(world, "1")
    world.set_state(state)
    world.drain()
    world.run_round()
    return world


def paused_and_open(world: World) -> list[tuple[bool, bool]]:
    """Return for each engine whether it is paused and whether its gate is open."""
    return [(agent.paused, agent.gate_open) for agent in world.agents.values()]


def test_a_paused_fleet_is_paused_and_closed_until_the_spec_changes() -> None:
    world = make()
    assert paused_and_open(world) == [(True, False)] * 2
    for _ in range(20):
        world.tick(200.0)  # no lease, no idle and no total deadline ends it
        world.run_round()
    assert paused_and_open(world) == [(True, False)] * 2
    assert world.record is not None
    assert world.record.state is FleetState.PAUSED
    world.set_state(FleetState.ACTIVE)
    world.drain()
    assert paused_and_open(world) == [(False, True)] * 2


def test_gates_close_before_engines_pause() -> None:
    world = World([1])
    world.sync_all()
    world.set_state(FleetState.PAUSED)
    world.drain()
    paths = [effect.path for effect in world.sent]
    assert paths.index(AGENT_SYNC) < paths.index(ControlCall.PAUSE.path)


def test_a_continue_is_answered_as_sglang_does_and_ends_nothing() -> None:
    world = make()
    answer = world.do(rq.Continue())
    assert answer.status == 200
    assert answer.message == (
        "Generation stays paused. The fleet is paused by its spec (spec.state: Paused). No engine generates until the state is Active."
        " Weight updates are accepted."
    )
    assert paused_and_open(world) == [(True, False)] * 2


@pytest.mark.parametrize("pauses", [True, False], ids=["pauses itself", "does not pause"])
@pytest.mark.parametrize("session", [True, False], ids=["session", "no session"])
def test_weights_are_taken_while_paused_and_the_commit_opens_no_gate(pauses: bool, session: bool) -> None:
    world = make()
    asked: list[rq.Request] = [rq.OpenGroup(group_body(world, "h"))]
    asked += [rq.Pause("abort", {"mode": "abort"})] if pauses else []
    asked += [rq.Begin()] if session else []
    asked += [rq.Update("h", "2", TENSORS)]
    asked += [rq.End()] if session else []
    asked += [rq.Continue()] if pauses or not session else []
    for request in asked:
        answer = world.do(request)
        assert answer.success, answer.message
    assert {agent.version for agent in world.agents.values()} == {Version(run=1, step=2, label="2")}
    world.run_round()
    assert paused_and_open(world) == [(True, False)] * 2
    world.set_state(FleetState.ACTIVE)
    world.drain()
    assert paused_and_open(world) == [(False, True)] * 2


def test_a_joiner_and_a_restarted_engine_come_up_paused() -> None:
    world = make()
    world.agents["e1"] = SimulatedAgent("e1", starts=2)  # a new pod
    world.agents["e2"] = SimulatedAgent("e2")
    world.engines = [*world.engines, world.engines[0].model_copy(update={"name": "e2"})]
    world.send_intent()
    for _ in range(3):
        world.run_round()
    assert paused_and_open(world) == [(True, False)] * 3


def test_an_engine_catches_up_while_the_fleet_is_paused_and_stays_paused() -> None:
    world = make()
    world.policy = world.policy.model_copy(update={"catch_up": CatchUp(disk=SNAPSHOTS)})
    for agent in world.agents.values():
        agent.stocked = True
    world.agents["e1"].restart()
    world.send_intent()
    world.run_round()
    world.run_round()
    assert world.agents["e1"].version == Version(run=1, step=1, label="1")
    assert paused_and_open(world) == [(True, False)] * 2


@pytest.mark.parametrize("keep_record", [True, False], ids=["with its record", "without"])
def test_a_new_coordinator_adopts_the_applied_state_and_can_end_it(keep_record: bool) -> None:
    world = make()
    if not keep_record:
        world.record = None
    before = len(world.sent)
    world.start()
    world.run_round()
    world.run_round()
    paths = {effect.path for effect in world.sent[before:]}
    assert not paths & {ControlCall.CONTINUE.path, AGENT_FENCE}
    assert paused_and_open(world) == [(True, False)] * 2
    world.set_state(FleetState.ACTIVE)
    world.drain()
    assert paused_and_open(world) == [(False, True)] * 2


def test_a_pause_that_the_spec_ended_without_a_coordinator_ends() -> None:
    world = make()
    world.state = FleetState.ACTIVE
    world.start()
    world.run_round()
    world.run_round()
    assert paused_and_open(world) == [(False, True)] * 2


def test_a_trainers_own_pause_outlasts_that_of_the_spec_and_keeps_its_lease() -> None:
    world = make()
    assert world.do(rq.Pause("retract", {"mode": "retract"})).success
    world.set_state(FleetState.ACTIVE)
    world.drain()
    assert [agent.paused for agent in world.agents.values()] == [True, True]
    assert world.do(rq.Continue()).message == "Generation continued successfully."
    assert paused_and_open(world) == [(False, True)] * 2


def test_a_trainer_that_dies_in_a_paused_fleet_loses_its_pause_and_the_fleet_stays_paused() -> None:
    world = make()
    assert world.do(rq.Pause("retract", {"mode": "retract"})).success
    world.tick(world.policy.deadlines.idle_seconds + 1)
    world.drain()
    assert world.machine.fleet.pause is None
    world.run_round()
    assert paused_and_open(world) == [(True, False)] * 2


def test_an_engine_that_cannot_be_paused_is_tried_again_and_trainers_are_not_kept_waiting() -> None:
    world = World([1, 1])
    world.sync_all()
    world.set_state(FleetState.PAUSED)
    world.complete()  # the sync
    world.complete(broken=frozenset({"e1"}))
    world.agents["e1"].resume()
    for _ in range(3):
        world.tick(0.5)
        world.sync_all()
        assert not world.pending, "the operation would keep the turn"
    world.tick(10.0)
    world.sync_all()
    world.drain()
    assert paused_and_open(world) == [(True, False)] * 2


@pytest.mark.parametrize("mode", ["retract", None], ids=["its mode", "no mode"])
@pytest.mark.parametrize("how", ["it came up since", "its agent's lease ended the pause"])
def test_an_engine_that_is_not_paused_in_a_trainers_pause_is_paused_before_its_session(how: str, mode: str | None) -> None:
    world = World([1, 1])
    world.sync_all()
    assert world.do(rq.Pause(mode, {"mode": mode} if mode else {})).success
    if how == "it came up since":
        world.agents["e1"].restart()
    else:
        world.agents["e1"].resume()
    world.run_round()
    assert world.do(rq.OpenGroup(group_body(world, "g"))).success
    world.sent.clear()
    assert world.do(rq.Begin()).success
    assert [(effect.path, dict(effect.bodies)) for effect in world.sent] == [
        (ControlCall.PAUSE.path, {"e1": {"mode": mode} if mode else {}}),
        (ControlCall.BEGIN_UPDATE.path, {"e0": {}, "e1": {}}),
    ]
    assert all(agent.paused for agent in world.agents.values())
    assert world.machine.fleet.pause is not None
    assert set(world.machine.fleet.pause.engines) == {"e0", "e1"}


def test_an_engine_that_came_up_in_a_pause_and_is_no_part_of_it_yet_is_paused_too() -> None:
    world = World([1])
    world.sync_all()
    assert world.do(rq.Pause("retract", {"mode": "retract"})).success
    world.agents["e1"] = SimulatedAgent("e1")
    world.engines = [*world.engines, world.engines[0].model_copy(update={"name": "e1"})]
    world.send_intent()
    world.run_round()
    assert world.do(rq.OpenGroup(group_body(world, "g"))).success
    assert world.do(rq.Begin()).success
    assert paused_and_open(world) == [(True, False)] * 2
    assert world.machine.fleet.pause is not None
    assert world.machine.fleet.pause.engines == ("e0", "e1")


def test_no_engine_is_paused_twice() -> None:
    world = World([1, 1])
    world.sync_all()
    assert world.do(rq.OpenGroup(group_body(world, "g"))).success
    world.answer_sync("e0")  # this answer arrives when the engine is paused
    world.now += 0.1
    assert world.do(rq.Pause("retract", {"mode": "retract"})).success
    world.now += 0.1
    world.deliver_sync("e0")
    assert world.do(rq.Begin()).success
    assert [effect.path for effect in world.sent].count(ControlCall.PAUSE.path) == 1


def test_an_engine_that_cannot_be_paused_late_fails_the_update_as_any_other() -> None:
    world = World([1, 1])
    world.sync_all()
    assert world.do(rq.Pause("retract", {"mode": "retract"})).success
    world.agents["e1"].restart()
    world.run_round()
    assert world.do(rq.OpenGroup(group_body(world, "g"))).success
    call = world.ask(rq.Begin())
    world.complete(broken=frozenset({"e1"}))
    world.drain()
    answer = world.answers[call]
    assert answer.status == 400
    assert answer.message == "engine e1 could not be paused: the engine failed. All engines generate again."
    assert world.machine.fleet.pause is None
    assert world.machine.fleet.update is None
    world.run_round()
    assert paused_and_open(world) == [(False, True)] * 2
