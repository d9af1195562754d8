"""Adapters over the state machine: every engine holds what the spec and trainers' calls say, and what went wrong is told."""

from __future__ import annotations

from fleet_agent import FakeAgent
from fleet_world import World, push
from test_fleet_held import tell

from sglang_rollout.fleet.update import requests as rq
from sglang_rollout.fleet.update.lora import LOAD, UNLOAD, rows
from sglang_rollout.wire.intent import Adapter
from sglang_rollout.wire.states import FleetState

A, B = Adapter(name="a", path="/lora/a"), Adapter(name="b", path="/lora/b")


def make(*adapters: Adapter) -> World:
    world = World([1, 1])
    want(world, *adapters)
    return world


def want(world: World, *adapters: Adapter) -> None:
    """The user writes the list."""
    world.adapters = list(adapters)
    world.generation += 1
    world.want()
    settled(world)


def settled(world: World) -> None:
    for _ in range(6):
        tell(world)


def held(world: World) -> list[dict[str, str]]:
    return [agent.adapters for agent in world.agents.values()]


def asked(world: World, path: str) -> int:
    return sum(len(effect.bodies) for effect in world.sent if effect.path == path)


def test_what_the_spec_lists_is_loaded_everywhere_and_what_it_drops_is_unloaded() -> None:
    world = make(A, B)
    assert held(world) == [{"a": "/lora/a", "b": "/lora/b"}] * 2
    assert [(row.name, row.loaded, row.wanted, row.reason) for row in rows(world.machine.fleet)] == [("a", 2, 2, ""), ("b", 2, 2, "")]
    want(world, B)
    assert held(world) == [{"b": "/lora/b"}] * 2
    settled(world)
    assert (asked(world, LOAD), asked(world, UNLOAD)) == (4, 2), "nothing is done twice"


def test_other_contents_under_an_old_name_are_unloaded_and_loaded() -> None:
    world = make(A)
    want(world, Adapter(name="a", path="/lora/a2"))
    assert held(world) == [{"a": "/lora/a2"}] * 2


def test_a_joiner_and_a_restarted_engine_get_them_also_after_a_push() -> None:
    world = make(A)
    push(world, "1")
    world.agents["e1"].restart()
    world.agents["e2"] = FakeAgent("e2")
    world.engines = [*world.engines, world.engines[0].model_copy(update={"name": "e2"})]
    world.want()
    settled(world)
    assert held(world) == [{"a": "/lora/a"}] * 3


def test_a_fleet_whose_spec_says_nothing_of_adapters_is_left_alone() -> None:
    world = World([1])
    world.agents["e0"].adapters = {"mine": "/x"}
    settled(world)
    assert held(world) == [{"mine": "/x"}]


def test_an_adapter_that_does_not_load_is_told_and_tried_again_later() -> None:
    world = World([1, 1])
    world.sync_all()
    world.adapters = [A, B]
    world.want()
    world.tick(0.5)
    world.sync_all()
    while asked(world, LOAD) == 0:
        tell(world)
        world.tick(0.5)
        world.sync_all()
    world.complete(broken=frozenset({"e1"}))
    for _ in range(4):
        tell(world)
    first, second = rows(world.machine.fleet)
    assert (first.loaded, first.wanted, first.reason) == (1, 2, "engine e1: the engine failed.")
    assert (second.loaded, second.reason) == (2, ""), "one that does not load holds up no other"
    world.tick(31)
    settled(world)
    assert [(row.loaded, row.reason) for row in rows(world.machine.fleet)] == [(2, ""), (2, "")]


def test_a_trainers_adapter_is_loaded_on_all_or_on_none() -> None:
    world = make()
    assert world.do(rq.LoadAdapter("t", "/t", {})).success
    assert held(world) == [{"t": "/t"}] * 2
    call = world.ask(rq.LoadAdapter("u", "/u", {}))
    world.complete(broken=frozenset({"e1"}))
    world.drain()
    answer = world.answers[call]
    assert (answer.status, answer.message) == (400, "engine e1 did not load u: the engine failed. It is loaded on no engine.")
    assert held(world) == [{"t": "/t"}] * 2
    world.agents["e0"].restart()
    settled(world)
    world.start()
    settled(world)
    assert held(world) == [{"t": "/t"}] * 2, "joiners and new coordinators know of it"
    assert world.do(rq.UnloadAdapter("t")).success
    settled(world)
    assert held(world) == [{}] * 2
    refused = world.do(rq.UnloadAdapter("t"))
    assert (refused.status, "t is not loaded. Loaded are: none." in refused.message) == (400, True)


def test_the_specs_adapters_are_the_specs_alone() -> None:
    world = make(A)
    for request in (rq.LoadAdapter("a", "/other", {}), rq.UnloadAdapter("a")):
        answer = world.do(request)
        assert (answer.status, "belongs to the spec (engine.lora.adapters)" in answer.message) == (409, True)
    assert held(world) == [{"a": "/lora/a"}] * 2


def test_nothing_is_loaded_while_the_fleet_sleeps_and_all_of_it_after() -> None:
    world = make()
    world.set_state(FleetState.ASLEEP)
    settled(world)
    want(world, A)
    assert held(world) == [{}] * 2
    world.set_state(FleetState.ACTIVE)
    settled(world)
    assert held(world) == [{"a": "/lora/a"}] * 2
