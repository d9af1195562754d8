"""Memory that engines release for a trainer or for the spec: what they may hold afterwards, and how that is reported."""

from __future__ import annotations

import pytest

from sglang_rollout.api.weights_spec import CatchUp
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.states import EngineState, FleetState, Version
from tests.properties.coordinator.test_spec_state import make
from tests.properties.support.coordinator_world import SNAPSHOTS, World, group_body, push
from tests.properties.support.simulated_agent import MEMORY, NAMES

V1 = Version(run=1, step=1, label="1")


def wake(world: World, state: FleetState = FleetState.ACTIVE) -> None:
    world.set_state(state)
    world.drain()
    world.settle()


def test_a_fleet_that_wakes_serves_when_its_checksums_are_those_of_the_record() -> None:
    world = make(FleetState.ASLEEP)
    world.settle()
    assert [agent.released for agent in world.agents.values()] == [[*MEMORY]] * 2
    assert world.record is not None
    assert world.record.checksums == {1: (f"of {sorted(world.agents['e0'].tensors.items())}",)}, "asked before anybody slept"
    world.start()  # the coordinator that received the call is gone; the record has it
    world.run_round()
    wake(world)
    assert all(agent.gate_open and agent.version == V1 for agent in world.agents.values())


def test_an_engine_that_was_restarted_unnoticed_does_not_define_the_committed_checksums() -> None:
    """It returns its checksums before it sleeps, and holds its initial weights."""
    world = World([1])
    world.sync_all()
    push(world, "1")
    world.agents["e0"].restart()
    world.set_state(FleetState.ASLEEP)
    world.drain()
    world.settle()
    wake(world)
    assert (world.agents["e0"].gate_open, world.agents["e0"].content) == (False, "base")


def test_an_engine_that_woke_with_other_bytes_stays_closed_until_a_push() -> None:
    world = make(FleetState.ASLEEP)
    world.settle()
    world.agents["e1"].backup = False
    wake(world)
    assert [agent.gate_open for agent in world.agents.values()] == [True, False]
    assert world.agents["e1"].state is EngineState.UNKNOWN
    asked = len([effect for effect in world.sent if effect.path == ControlCall.CHECK_WEIGHTS.path])
    world.settle()
    assert len([effect for effect in world.sent if effect.path == ControlCall.CHECK_WEIGHTS.path]) == asked, "it is compared once"
    assert push(world, "2", NAMES) == Version(run=1, step=2, label="2")
    world.settle()
    assert all(agent.gate_open for agent in world.agents.values())


def test_an_engine_that_woke_with_other_bytes_catches_up_from_a_volume() -> None:
    world = make(FleetState.ASLEEP)
    world.policy = world.policy.model_copy(update={"catch_up": CatchUp(disk=SNAPSHOTS)})
    for agent in world.agents.values():
        agent.stocked = True
    world.agents["e1"].backup = False
    world.send_intent()
    world.settle()
    wake(world)
    world.settle()
    assert all(agent.gate_open and agent.version == V1 for agent in world.agents.values())


def test_a_fleet_that_wakes_into_a_pause_is_proved_and_stays_paused() -> None:
    world = make(FleetState.ASLEEP)
    world.settle()
    wake(world, FleetState.PAUSED)
    assert all(agent.paused and not agent.gate_open and agent.version == V1 for agent in world.agents.values())


@pytest.mark.parametrize(
    "request_",
    [
        rq.Pause("abort", {"mode": "abort"}),
        rq.Begin(),
        rq.FromDisk("/x", None, {}),
        rq.ResumeMemory(("weights",)),
        rq.Update("g", "2", {}),
    ],
    ids=lambda request: type(request).__name__,
)
def test_a_trainers_call_to_a_sleeping_fleet_is_refused_with_the_reason(request_: rq.Request) -> None:
    world = make(FleetState.ASLEEP)
    world.settle()
    answer = world.do(request_)
    assert (answer.status, "spec.state: Asleep" in answer.message) == (409, True), answer
    group = world.do(rq.OpenGroup(group_body(world, "h")))
    assert (group.status, "spec.state: Asleep" in group.message) == (409, True), group
    assert world.do(rq.Continue()).success, "said in a finally, after all else was refused"
    assert world.do(rq.ReleaseMemory()).success, "there is nothing left to do"


def test_falling_asleep_ends_a_trainers_pause() -> None:
    world = World([1, 1])
    world.sync_all()
    push(world, "1")
    assert world.do(rq.Pause("retract", {"mode": "retract"})).success
    world.set_state(FleetState.ASLEEP)
    world.drain()
    world.settle()
    assert world.machine.fleet.pause is None
    wake(world)
    assert all(agent.gate_open and not agent.paused for agent in world.agents.values())


def test_a_trainer_releases_updates_and_resumes() -> None:
    """A trainer that shares the engines' GPUs resumes the cache after the weights."""
    world = World([1, 1])
    world.sync_all()
    push(world, "1")
    for agent in world.agents.values():
        agent.backup = False
    assert world.do(rq.ReleaseMemory()).success
    world.settle()
    refused = world.do(rq.Begin())
    assert (refused.status, "resume_memory_occupation first" in refused.message) == (409, True)
    assert world.do(rq.ResumeMemory(("weights",))).success
    world.settle()
    assert push(world, "2", NAMES) == Version(run=1, step=2, label="2")
    world.settle()
    assert not any(agent.gate_open for agent in world.agents.values()), "without a cache nothing generates"
    assert world.do(rq.ResumeMemory(("kv_cache", "cuda_graph"))).success
    world.settle()
    assert all(agent.gate_open and not agent.paused for agent in world.agents.values())
    assert world.do(rq.ResumeMemory()).success, "nothing to do is no error: the engines would end"


def test_a_release_that_one_engine_refuses_is_reported_and_can_continue() -> None:
    world = World([1, 1])
    world.sync_all()
    call = world.ask(rq.ReleaseMemory())
    world.complete(broken=frozenset({"e1"}))
    world.drain()
    answer = world.answers[call]
    assert (answer.status, "engine e1 did not release its memory" in answer.message, "Done on: e0" in answer.message) == (502, True, True)
    assert world.do(rq.ReleaseMemory()).success
    assert ControlCall.CONTINUE.path not in [effect.path for effect in world.sent]
