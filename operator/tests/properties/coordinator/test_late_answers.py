"""What crosses a call under way: outdated answers, and engines that leave and come."""

from __future__ import annotations

import pytest

from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.events import Answered, Result
from sglang_rollout.coordinator.update.requests import AtEngine
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.states import FleetMode
from tests.properties.coordinator.test_hybrid import at, tensors
from tests.properties.support.coordinator_world import World, group_body, push


@pytest.mark.parametrize("when", ["while the call is under way", "after the update was given up"])
def test_the_answer_to_a_sync_from_before_an_update_does_not_make_its_engines_serve(when: str) -> None:
    """A sync may cross the call that begins the update: its answer describes an earlier state than the coordinator knows."""
    world = World([1, 1])
    world.sync_all()
    push(world, "1")
    for name in world.agents:
        world.answer_sync(name)
    world.now += 0.1
    call = world.ask(rq.Begin())
    if when == "after the update was given up":
        world.drain()
        call = world.ask(rq.End())
        world.drain()
    else:
        world.complete()  # the pause
    for name in world.agents:
        world.deliver_sync(name)
    assert [engine.serving for engine in world.machine.fleet.engines.values()] == [False, False]
    world.drain()
    assert world.answers[call].success is (when == "while the call is under way")
    world.sync_all()
    assert not any(engine.serving for engine in world.machine.fleet.engines.values())
    push(world, "2")
    assert all(engine.serving for engine in world.machine.fleet.engines.values())


@pytest.mark.parametrize("what", ["leaves", "comes"])
def test_a_group_opens_with_the_ranks_of_the_members_at_the_time_of_the_call(what: str) -> None:
    """The trainer begins again; while its old update is given up and its old group is closed, the first engine leaves or comes."""
    world = World([1, 1], min_committed=1)
    world.agents["e0"].up = what == "leaves"
    world.sync_all()
    assert world.do(rq.OpenGroup(group_body(world, "g"))).success
    assert world.do(rq.Begin()).success
    world.sent.clear()
    call = world.ask(rq.OpenGroup(group_body(world, "g")))
    world.complete()  # the preflight
    assert call not in world.answers
    world.agents["e0"].draining, world.agents["e0"].up = what == "leaves", True
    world.sync("e0")
    world.drain()
    answer = world.answers[call]
    assert (answer.status, answer.success) == (400, False)
    assert "engines of this fleet changed while the process group was being opened" in answer.message
    assert answer.fleet["world_size"] == world.machine.fleet.table.world_size == (2 if what == "leaves" else 3)
    assert not [send for send in world.sent if send.path == ControlCall.INIT_GROUP.path]
    assert push(world, "1") is not None


def test_the_status_of_another_engine_at_an_engines_address_is_ignored() -> None:
    """An address that moved from one pod to another: a status counts only for the engine that was called."""
    world = World([1, 1])
    world.sync_all()
    before = {name: engine.status for name, engine in world.machine.fleet.engines.items()}
    world.agents["e1"].restart()
    for name in ("e0", "e1"):
        answered = Result(ok=True, status=200, agent=world.agents["e1"].status())
        world.feed(Answered(10**6, {name: answered}, world.now))
        after = {name: engine.status for name, engine in world.machine.fleet.engines.items()}
        assert after == (before if name == "e0" else before | {"e1": world.agents["e1"].status()})


MEMORY: list[rq.Call] = [rq.Flush(), rq.ReleaseMemory(), rq.ResumeMemory(("weights",))]
WEIGHTS: list[rq.Call] = [tensors("a"), rq.Begin(), rq.End()]


@pytest.mark.parametrize(
    ("mode", "call"),
    [(mode, call) for mode in FleetMode for call in [*MEMORY, *(WEIGHTS if mode is FleetMode.HYBRID else [])]],
    ids=lambda value: value.value if isinstance(value, FleetMode) else type(value).__name__,
)
def test_a_call_whose_engine_leaves_before_its_turn_is_refused_as_one_at_an_unknown_engine(mode: FleetMode, call: rq.Call) -> None:
    world = World([1, 1, 1])
    world.mode = mode
    world.send_intent()
    world.settle()
    first = world.ask(AtEngine("e0", rq.ResumeMemory()))
    waiting = world.ask(AtEngine("e2", call))
    assert waiting not in world.answers
    world.engines = world.engines[:2]
    world.generation += 1
    world.send_intent()
    world.drain()
    assert world.answers[first].success
    assert world.answers[waiting].status == 404
    assert world.answers[waiting] == at(world, "e2", call)
    assert "e2" not in world.machine.fleet.interruptions.at_engines
