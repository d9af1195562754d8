"""Engines that hold unknown tensors: after a push of some tensors none of them serves a mixture."""

from __future__ import annotations

import pytest

from sglang_rollout.api.weights_spec import CatchUp, Weights
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.requests import Answer
from sglang_rollout.wire.states import FleetState
from tests.properties.support.coordinator_world import World, group_body, push
from tests.properties.support.simulated_agent import NAMES

SOME = ("w",)


def update(world: World, *names: str) -> Answer:
    """Make an update of these tensors. Returns the answer to its end."""
    assert world.do(rq.OpenGroup(group_body(world, f"g-{world.calls}"))).success
    assert world.do(rq.Begin()).success
    assert world.do(rq.Update(list(world.machine.fleet.groups)[-1], None, {"names": list(names)})).success
    answer = world.do(rq.End())
    world.settle()
    return answer


def served(world: World) -> list[bool]:
    """Return whether each gate is open. Fails if open engines hold different tensors."""
    world.settle()
    held = [agent.tensors for agent in world.agents.values() if agent.gate_open]
    assert all(one == held[0] for one in held), held
    assert not any("whatever" in str(one) for one in held), held
    return [agent.gate_open for agent in world.agents.values()]


def released(how: str, pushed: tuple[str, ...] = ()) -> World:
    """Two engines without a backup of their weights, whose memory was released and restored."""
    world = World([1, 1])
    for agent in world.agents.values():
        agent.backup = False
    world.sync_all()
    if pushed:
        push(world, "1", pushed)
    if how == "by the trainer":
        for request in (rq.Pause("abort"), rq.ReleaseMemory(), rq.ResumeMemory(), rq.Continue()):
            world.do(request)
    else:
        for state in (FleetState.ASLEEP, FleetState.ACTIVE):
            world.set_state(state)
            world.settle()
    assert served(world) == [False, False]
    return world


@pytest.mark.parametrize("pushed", [(), SOME, NAMES])
@pytest.mark.parametrize("how", ["by the trainer", "by spec.state"])
def test_weights_that_were_released_come_back_with_all_tensors_of_the_model(how: str, pushed: tuple[str, ...]) -> None:
    world = released(how, pushed)
    answer = update(world, *SOME)
    assert not answer.success
    assert "lacks 2 of 3 tensors" in answer.message
    assert served(world) == [False, False]
    assert not update(world, *SOME).success, "a failed update does not reduce the tensors that are required"
    assert update(world, *NAMES).success
    assert served(world) == [True, True]


def test_where_no_pod_can_read_the_model_what_was_pushed_before_tells_what_is_complete() -> None:
    world = released("by the trainer", NAMES)
    for agent in world.agents.values():
        agent.readable = False
    assert not update(world, *SOME).success
    assert update(world, *NAMES).success
    assert served(world) == [True, True]


@pytest.mark.parametrize("restarted", [False, True])
def test_what_a_failed_catch_up_has_written_must_be_pushed_again(restarted: bool) -> None:
    """The folder of that name is another run's: the comparison tells, and the engine holds all of it."""
    world = World([1, 1], min_committed=1)
    world.policy = Weights(min_committed=1, catch_up=CatchUp(disk="/ckpt/{version}"))
    world.send_intent()
    world.sync_all()
    push(world, "1", SOME)
    world.agents["e1"].restart()
    world.settle()
    assert "other weights" in world.machine.fleet.engines["e1"].note
    if restarted:
        world.policy = Weights(min_committed=1)  # else it tries again, and takes part in no push meanwhile
        world.start()
        world.settle()
    answer = update(world, *SOME)
    assert answer.success
    assert "e1" in answer.fleet["fenced"]
    assert served(world)[0]
    assert update(world, *NAMES).message == "Success"
    assert served(world) == [True, True]


def folder(holds: tuple[str, ...], readable: bool) -> World:
    """Version 1 is served; checkpoints hold these tensors, and agents can read ``model.path`` or not."""
    world = World([1, 1], min_committed=1)
    world.sync_all()
    push(world, "1", NAMES)
    for agent in world.agents.values():
        agent.holds, agent.readable = holds, readable
    return world


def test_a_checkpoint_that_no_pod_could_compare_brings_the_tensors_that_it_has() -> None:
    world = folder(SOME, readable=False)
    assert world.do(rq.OpenGroup(group_body(world, "h"))).success
    assert world.do(rq.Begin()).success
    world.ask(rq.Update("h", "2", {"names": ["u", "v"]}))
    world.complete(broken=frozenset({"e1"}))
    world.drain()
    assert served(world) == [False, False]
    assert not world.do(rq.FromDisk("/ckpt", "3", {})).success
    assert served(world) == [False, False]
    for agent in world.agents.values():
        agent.holds = NAMES
    assert world.do(rq.FromDisk("/ckpt", "4", {})).success
    assert served(world) == [True, True]


def test_a_checkpoint_of_some_tensors_forgets_none_of_the_others() -> None:
    world = folder(SOME, readable=False)
    assert world.do(rq.FromDisk("/ckpt", "2", {})).success
    world.agents["e1"].restart()
    world.machine.fleet.weights.disk = None
    world.settle()
    assert "e1" in update(world, *SOME).fleet["fenced"]
    assert served(world) == [True, False]
