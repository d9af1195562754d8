"""Adapters over the state machine: every engine holds what the spec and trainers' calls say, and failures are reported."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.adapters import rows
from sglang_rollout.coordinator.update.events import Write
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.record import Adapter
from sglang_rollout.wire.states import FleetState
from tests.properties.support.coordinator_world import World, push
from tests.properties.support.simulated_agent import SimulatedAgent

A, B = Adapter(name="a", path="/lora/a"), Adapter(name="b", path="/lora/b")


def make(*adapters: Adapter) -> World:
    world = World([1, 1])
    want(world, *adapters)
    return world


def want(world: World, *adapters: Adapter) -> None:
    """The user writes the list."""
    world.adapters = list(adapters)
    world.generation += 1
    world.send_intent()
    world.settle()


def held(world: World) -> list[dict[str, str]]:
    return [agent.adapters for agent in world.agents.values()]


def asked(world: World, path: str) -> int:
    return sum(len(effect.bodies) for effect in world.sent if effect.path == path)


def test_what_the_spec_lists_is_loaded_everywhere_and_what_it_drops_is_unloaded() -> None:
    world = make(A, B)
    assert held(world) == [{"a": "/lora/a", "b": "/lora/b"}] * 2
    assert [(row.name, row.loaded, row.wanted, row.message) for row in rows(world.machine.fleet)] == [("a", 2, 2, ""), ("b", 2, 2, "")]
    want(world, B)
    assert held(world) == [{"b": "/lora/b"}] * 2
    world.settle()
    assert (asked(world, ControlCall.LOAD_ADAPTER.path), asked(world, ControlCall.UNLOAD_ADAPTER.path)) == (4, 2), "nothing is done twice"


def test_other_contents_under_an_old_name_are_unloaded_and_loaded() -> None:
    world = make(A)
    want(world, Adapter(name="a", path="/lora/a2"))
    assert held(world) == [{"a": "/lora/a2"}] * 2


def test_a_joiner_and_a_restarted_engine_get_them_also_after_a_push() -> None:
    world = make(A)
    push(world, "1")
    world.agents["e1"].restart()
    world.agents["e2"] = SimulatedAgent("e2")
    world.engines = [*world.engines, world.engines[0].model_copy(update={"name": "e2"})]
    world.send_intent()
    world.settle()
    assert held(world) == [{"a": "/lora/a"}] * 3


def test_a_fleet_whose_spec_lists_no_adapters_is_left_alone() -> None:
    world = World([1])
    world.agents["e0"].forget(adapters={"mine": "/x"})
    world.settle()
    assert held(world) == [{"mine": "/x"}]


def test_an_adapter_that_does_not_load_is_reported_and_tried_again_later() -> None:
    world = World([1, 1])
    world.sync_all()
    world.adapters = [A, B]
    world.send_intent()
    world.tick(0.5)
    world.sync_all()
    while asked(world, ControlCall.LOAD_ADAPTER.path) == 0:
        world.run_round()
        world.tick(0.5)
        world.sync_all()
    world.complete(broken=frozenset({"e1"}))
    for _ in range(4):
        world.run_round()
    first, second = rows(world.machine.fleet)
    assert (first.loaded, first.wanted, first.message) == (1, 2, "engine e1: the engine failed.")
    assert (second.loaded, second.message) == (2, ""), "an adapter that does not load delays no other"
    world.tick(31)
    world.settle()
    assert [(row.loaded, row.message) for row in rows(world.machine.fleet)] == [(2, ""), (2, "")]


def test_a_trainers_adapter_is_loaded_on_all_or_on_none() -> None:
    world = make()
    assert world.do(rq.LoadAdapter("t", "/t")).success
    assert held(world) == [{"t": "/t"}] * 2
    call = world.ask(rq.LoadAdapter("u", "/u"))
    world.complete(broken=frozenset({"e1"}))
    world.drain()
    answer = world.answers[call]
    assert (answer.status, answer.message) == (400, "engine e1 did not load u: the engine failed. It is loaded on no engine.")
    assert held(world) == [{"t": "/t"}] * 2
    world.agents["e0"].restart()
    world.settle()
    world.start()
    world.settle()
    assert held(world) == [{"t": "/t"}] * 2, "joiners and new coordinators know of it"
    assert world.do(rq.UnloadAdapter("t")).success
    world.settle()
    assert held(world) == [{}] * 2
    refused = world.do(rq.UnloadAdapter("t"))
    assert (refused.status, "t is not loaded. Loaded are: none." in refused.message) == (400, True)


def test_the_specs_adapters_are_the_specs_alone() -> None:
    world = make(A)
    for request in (rq.LoadAdapter("a", "/other"), rq.UnloadAdapter("a")):
        answer = world.do(request)
        assert (answer.status, "belongs to the spec (engine.lora.adapters)" in answer.message) == (409, True)
    assert held(world) == [{"a": "/lora/a"}] * 2


def test_nothing_is_loaded_while_the_fleet_sleeps_and_all_of_it_after() -> None:
    world = make()
    world.set_state(FleetState.ASLEEP)
    world.settle()
    want(world, A)
    assert held(world) == [{}] * 2
    world.set_state(FleetState.ACTIVE)
    world.settle()
    assert held(world) == [{"a": "/lora/a"}] * 2


def read(world: World) -> list[str | None]:
    """What each engine answers from when a request names adapter t."""
    return [agent.read.get("t") for agent in world.agents.values()]


def write(world: World, path: str, contents: str) -> None:
    """A trainer saves an adapter where every engine finds it."""
    for agent in world.agents.values():
        agent.folders[path] = contents


@pytest.mark.parametrize("path", ["/t", "/t2"])
def test_a_trainer_replaces_an_adapter_also_under_the_same_path(path: str) -> None:
    world = make()
    write(world, "/t", "step 1")
    assert world.do(rq.LoadAdapter("t", "/t")).success
    write(world, path, "step 2")
    assert world.do(rq.LoadAdapter("t", path)).success
    assert read(world) == ["step 2"] * 2
    done = asked(world, ControlCall.LOAD_ADAPTER.path)
    world.settle()
    assert (held(world), asked(world, ControlCall.LOAD_ADAPTER.path)) == ([{"t": path}] * 2, done), "no engine loads it again"


def test_an_engine_that_was_away_while_an_adapter_was_overwritten_reads_it_again() -> None:
    world = make()
    assert world.do(rq.LoadAdapter("t", "/t")).success
    away = world.agents["e1"]
    away.answers = False
    world.settle()
    write(world, "/t", "step 2")
    assert world.do(rq.LoadAdapter("t", "/t")).success
    assert read(world) == ["step 2", "/t"]
    away.answers = True
    world.settle()
    assert read(world) == ["step 2"] * 2
    done = asked(world, ControlCall.LOAD_ADAPTER.path)
    world.settle()
    assert asked(world, ControlCall.LOAD_ADAPTER.path) == done


def replace_and_fail(world: World, path: str, step: str) -> str:
    """Adapter t was loaded from /t; engine e1 fails at a step of loading it from ``path``. The sentence that the trainer gets."""
    assert world.do(rq.LoadAdapter("t", "/t")).success
    call = world.ask(rq.LoadAdapter("t", path))
    if step == "load":
        world.complete()
    world.complete(broken=frozenset({"e1"}))
    world.drain()
    assert world.answers[call].status == 400
    return world.answers[call].message


@pytest.mark.parametrize("step", ["load", "unload"])
def test_a_replacement_that_fails_leaves_the_old_adapter_where_it_is(step: str) -> None:
    world = make()
    said = replace_and_fail(world, "/t2", step)
    assert said == f"engine e1 did not {step} t: the engine failed. It is /t as before."
    assert read(world) == ["/t"] * 2
    world.settle()
    assert [(row.path, row.loaded, row.message) for row in rows(world.machine.fleet)] == [("/t", 2, "")]


def test_an_overwritten_adapter_that_does_not_load_is_on_no_engine() -> None:
    world = make()
    assert replace_and_fail(world, "/t", "load") == "engine e1 did not load t: the engine failed. It is loaded on no engine."
    assert (read(world), rows(world.machine.fleet)) == ([None] * 2, [])
    world = make()
    assert replace_and_fail(world, "/t", "unload") == "engine e1 did not unload t: the engine failed. Still loaded on: e1."
    world.settle()
    assert read(world) == [None] * 2, "the old contents are not left on the one that failed"


def test_an_old_adapter_that_is_gone_from_its_path_is_reported_as_not_loaded() -> None:
    world = make()
    assert world.do(rq.LoadAdapter("t", "/t")).success
    world.agents["e0"].folders["/t"] = ""
    call = world.ask(rq.LoadAdapter("t", "/t2"))
    world.complete()
    world.complete(broken=frozenset({"e1"}))
    world.drain()
    assert world.answers[call].message.endswith("/t was to be loaded again and is not on: e0. The coordinator tries again.")
    world.settle()
    (row,) = rows(world.machine.fleet)
    assert (row.loaded, row.wanted, row.message) == (1, 2, "engine e0: the engine failed.")


@pytest.mark.parametrize("crossing", ["load", "unload"])
def test_an_answer_to_a_sync_before_a_call_does_not_revert_the_call(crossing: str) -> None:
    world = make()
    if crossing == "unload":
        assert world.do(rq.LoadAdapter("t", "/t")).success
        world.settle()
    world.answer_sync("e1")  # this answer arrives after the call
    world.now += 0.1
    assert world.do(rq.LoadAdapter("t", "/t") if crossing == "load" else rq.UnloadAdapter("t")).success
    done = asked(world, ControlCall.LOAD_ADAPTER.path), asked(world, ControlCall.UNLOAD_ADAPTER.path)
    world.now += 0.1
    world.deliver_sync("e1")
    assert [row.loaded for row in rows(world.machine.fleet)] == [2] * (crossing == "load")
    world.settle()
    assert (asked(world, ControlCall.LOAD_ADAPTER.path), asked(world, ControlCall.UNLOAD_ADAPTER.path)) == done, (
        "no engine loads or unloads it again"
    )
    assert held(world) == [{"t": "/t"} if crossing == "load" else {}] * 2
    assert not any(engine.adapter_trouble for engine in world.machine.fleet.engines.values())


def test_a_call_right_after_a_crossing_answer_reaches_every_engine() -> None:
    world = make()
    world.answer_sync("e1")
    world.now += 0.1
    assert world.do(rq.LoadAdapter("t", "/t")).success
    world.now += 0.1
    world.deliver_sync("e1")
    assert world.do(rq.UnloadAdapter("t")).success
    assert held(world) == [{}] * 2


def test_a_failure_is_forgotten_when_the_engine_has_carried_out_the_call() -> None:
    """Its agent answered too late, and the engine carried out the call."""
    world = make(A)
    engine = world.machine.fleet.engines["e1"]
    world.agents["e1"].restart()
    world.sync_all()
    while asked(world, ControlCall.LOAD_ADAPTER.path) < 3:
        world.tick(0.5)
        world.sync_all()
    world.complete(lost=frozenset({"e1"}))
    assert engine.adapter_trouble == {"a": "engine e1: no answer within 60 s."}
    world.settle()
    assert [(row.loaded, row.message) for row in rows(world.machine.fleet)] == [(2, "")]
    assert (engine.adapter_trouble, asked(world, ControlCall.LOAD_ADAPTER.path)) == ({}, 3)


@pytest.mark.parametrize("spec", [True, False], ids=["wanted", "not wanted"])
def test_an_adapter_that_may_be_loaded_is_unloaded_first(spec: bool) -> None:
    """The agent was restarted during the call."""
    world = make(A) if spec else make()
    agent = world.agents["e1"]
    agent.forget(adapters={"a": ""})
    agent.engine.read = {"a": "unknown"}
    world.run_round()
    assert [(row.loaded, row.message) for row in rows(world.machine.fleet)] == [(1, "")] * spec
    world.settle()
    assert held(world) == [{"a": "/lora/a"} if spec else {}] * 2
    assert agent.read == ({"a": "/lora/a"} if spec else {})


def pinned(world: World) -> list[set[str]]:
    return [agent.pinned for agent in world.agents.values()]


def test_a_pinned_adapter_is_pinned_on_joiners_on_restarted_engines_and_by_a_new_coordinator() -> None:
    world = make()
    assert world.do(rq.LoadAdapter("t", "/t", pinned=True)).success
    world.agents["e1"].restart()
    world.agents["e2"] = SimulatedAgent("e2")
    world.engines = [*world.engines, world.engines[0].model_copy(update={"name": "e2"})]
    world.send_intent()
    world.settle()
    assert (held(world), pinned(world)) == ([{"t": "/t"}] * 3, [{"t"}] * 3)
    world.start()
    world.settle()
    world.agents["e0"].restart()
    world.settle()
    assert (pinned(world), [row.pinned for row in rows(world.machine.fleet)]) == ([{"t"}] * 3, [True])
    want(world, Adapter(name="u", path="/u", pinned=True))
    assert pinned(world) == [{"t", "u"}] * 3, "an intent without Kubernetes may pin, too"


def test_joiners_get_a_trainers_adapter_also_where_the_spec_lists_none() -> None:
    world = World([1, 1])
    world.settle()
    world.agents["e0"].forget(adapters={"mine": "/x"})
    world.settle()
    assert world.do(rq.LoadAdapter("t", "/t", pinned=True)).success
    world.agents["e1"].restart()
    world.settle()
    assert (held(world), pinned(world)) == ([{"mine": "/x", "t": "/t"}, {"t": "/t"}], [{"t"}] * 2)


@pytest.mark.parametrize("step", ["load", "unload"])
def test_a_replacement_that_fails_leaves_the_old_adapter_pinned(step: str) -> None:
    world = make()
    assert world.do(rq.LoadAdapter("t", "/t", pinned=True)).success
    call = world.ask(rq.LoadAdapter("t", "/t2"))
    if step == "load":
        world.complete()
    world.complete(broken=frozenset({"e1"}))
    world.drain()
    assert world.answers[call].message == f"engine e1 did not {step} t: the engine failed. It is /t as before."
    assert (held(world), pinned(world)) == ([{"t": "/t"}] * 2, [{"t"}] * 2)


def test_the_record_of_a_commit_names_the_adapters() -> None:
    """A coordinator that ends right after it would have its successor unload them."""
    world = make()
    assert world.do(rq.LoadAdapter("t", "/t", pinned=True)).success
    world.ask(rq.FromDisk("/snapshots/5", "5", {"model_path": "/snapshots/5"}))
    while not isinstance(commit := world.pending[0], Write):
        world.complete()
    assert [(row.name, row.path, row.pinned) for row in commit.record.adapters] == [("t", "/t", True)]


def test_more_adapters_than_the_record_holds_are_refused_before_any_engine_is_called() -> None:
    world = make()
    fleet = world.machine.fleet
    fleet.adapters.of_trainers = {str(n): Adapter(name=str(n), path="/" * 4000) for n in range(19)}
    world.settle()
    refused = world.do(rq.LoadAdapter("one-more", "/" * 4000))
    assert refused.status == 400
    assert "LoRA adapter one-more has no room in the fleet's record: with it the 20 adapters" in refused.message
    assert not any(
        "one-more" in body["lora_name"]
        for effect in world.sent
        if effect.path == ControlCall.LOAD_ADAPTER.path
        for body in effect.bodies.values()
    )
    assert world.do(rq.LoadAdapter("one-more", "/short")).success


LOADS = st.lists(
    st.tuples(st.sampled_from(["/t", "/t2"]), st.sets(st.sampled_from(["unload", "load", "back"])), st.sampled_from(["e0", "e1"])),
    min_size=1,
    max_size=6,
)


@given(LOADS)
def test_all_engines_answer_from_the_same_contents_whatever_fails(loads: list[tuple[str, set[str], str]]) -> None:
    world = make()
    for number, (path, wrong, engine) in enumerate(loads):
        write(world, path, f"step {number}")
        call, steps = world.ask(rq.LoadAdapter("t", path)), 0
        while world.pending:
            stage = "unload" if world.sent[-1].path == ControlCall.UNLOAD_ADAPTER.path else "load" if steps < 2 else "back"
            world.complete(broken=frozenset({engine}) if stage in wrong else frozenset())
            steps += 1
        if world.answers[call].success:
            assert read(world) == [f"step {number}"] * 2
        world.tick(31)
        world.settle()
        first, second = read(world)
        assert first == second, "two engines answer one name from different contents"
