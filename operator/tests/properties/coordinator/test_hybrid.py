"""A fleet on its trainer's GPUs, whose trainer sends weights to each engine at its own URL, as one transaction over all engines."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_rollout.api.weights_spec import Verify
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.requests import Answer, AtEngine
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.record import UpdateOutcome
from sglang_rollout.wire.states import BASE, EngineState, FleetMode, FleetState
from tests.properties.support.coordinator_world import World, group_body
from tests.properties.support.search_depth import examples

WEIGHTS, CACHE = ("weights",), ("kv_cache",)
SLEEP = ("kv_cache", "weights")
"""What verl's sleep names."""


def make(engines: int = 2) -> World:
    world = World([1] * engines)
    world.mode = FleetMode.HYBRID
    world.send_intent()
    world.settle()
    return world


def at(world: World, engine: str, call: rq.Call) -> Answer:
    return world.do(AtEngine(engine, call))


def tensors(handle: str, label: str | None = None, **more: Any) -> rq.Tensors:
    return rq.Tensors(label, {"serialized_named_tensors": [handle], "flush_cache": False, **more})


def feed(world: World, engine: str, handle: str, label: str | None = None) -> Answer:
    """Resume the memory of the weights, then send tensors, as verl does."""
    assert at(world, engine, rq.ResumeMemory(WEIGHTS)).success
    return at(world, engine, tensors(handle, label))


def push(world: World, handle: str, label: str | None = None) -> Answer:
    """Make a push as verl does: resume weights, send tensors, resume the cache, flush."""
    for engine in world.agents:
        assert feed(world, engine, handle, label).success
    for engine in world.agents:
        answer = at(world, engine, rq.ResumeMemory(CACHE))
        assert answer.success, answer
    for engine in world.agents:
        answer = at(world, engine, rq.Flush())
        assert answer.success, answer
    return answer


def gates(world: World) -> list[bool]:
    return [agent.gate_open for agent in world.agents.values()]


def held(world: World) -> list[list[str]]:
    return [agent.handles for agent in world.agents.values()]


def test_it_sleeps_until_weights_come_and_all_engines_open_together() -> None:
    world = make()
    assert [set(agent.released) for agent in world.agents.values()] == [set(SLEEP)] * 2
    for engine in ("e0", "e1"):
        assert feed(world, engine, "a").success
    first = at(world, "e0", rq.ResumeMemory(CACHE))
    assert (first.success, first.fleet["waits_for"], gates(world)) == (True, ["e1"], [False, False])
    assert world.machine.fleet.committed == BASE
    last = at(world, "e1", rq.ResumeMemory(CACHE))
    assert (last.success, gates(world)) == (True, [True, True]), "when the last one is answered"
    assert world.machine.fleet.committed is not None
    assert world.machine.fleet.committed.step == 1, "a push without a version counts one"


def test_step_after_step_sleeps_takes_weights_and_serves() -> None:
    world = make()
    for step in range(1, 4):
        assert push(world, f"step {step}", str(10 * step)).success
        world.settle()
        assert (gates(world), held(world)) == ([True] * 2, [[f"step {step}"]] * 2)
        committed = world.machine.fleet.committed
        assert committed is not None
        assert (committed.step, committed.label) == (10 * step, str(10 * step))
        for engine in world.agents:
            assert at(world, engine, rq.ReleaseMemory(SLEEP)).success
        world.settle()
        assert gates(world) == [False] * 2


def test_one_engine_sleeps_while_the_other_serves() -> None:
    world = make()
    push(world, "a")
    assert at(world, "e0", rq.ReleaseMemory(CACHE)).success
    world.settle()
    assert gates(world) == [False, True]
    assert world.machine.fleet.why_not_generating == ""
    assert at(world, "e0", rq.ResumeMemory(CACHE)).success
    assert gates(world) == [True, True], "its weights were never gone"


def test_a_fleet_that_was_never_asleep_takes_weights_and_a_flush_commits() -> None:
    world = make()
    assert world.do(rq.ResumeMemory()).success
    for engine in world.agents:
        assert at(world, engine, tensors("a")).success
    assert gates(world) == [False, False]
    assert at(world, "e0", rq.Flush()).fleet["waits_for"] == ["e1"]
    assert at(world, "e1", rq.Flush()).success
    assert (gates(world), [agent.paused for agent in world.agents.values()]) == ([True, True], [False, False])


def test_an_engine_that_could_not_be_put_to_sleep_stays_awake_once_it_has_weights() -> None:
    """SGLang without a memory saver, for example on a CPU."""
    world = World([1])
    world.mode = FleetMode.HYBRID
    world.send_intent()
    world.tick(0.5)
    world.sync_all()
    world.drain(failing=ControlCall.RELEASE_MEMORY.path, engines={"e0"})
    assert world.agents["e0"].released == []
    assert at(world, "e0", tensors("a")).success
    assert at(world, "e0", rq.Flush()).success
    world.tick(60.0)
    world.settle()
    assert gates(world) == [True]


def test_a_trainer_with_sessions_ends_them_itself() -> None:
    world = make()
    assert world.do(rq.ResumeMemory()).success
    for engine in world.agents:
        assert at(world, engine, rq.Begin()).success
        assert at(world, engine, tensors("a")).success
        assert at(world, engine, tensors("b")).success
        assert at(world, engine, rq.Flush()).success
    assert gates(world) == [False, False], "its flush says nothing"
    for engine in world.agents:
        assert at(world, engine, rq.End()).success
    assert (gates(world), held(world)) == ([True, True], [["a", "b"]] * 2)
    assert sum(len(send.bodies) for send in world.sent if send.path == ControlCall.END_UPDATE.path) == 2, "each session once"


def test_engines_that_hold_different_bytes_do_not_commit() -> None:
    world = make()
    assert world.do(rq.ResumeMemory()).success
    world.agents["e1"].checksum = "other"
    for engine in world.agents:
        assert at(world, engine, tensors("a")).success
    at(world, "e0", rq.Flush())
    answer = at(world, "e1", rq.Flush())
    assert any(send.path == ControlCall.CHECK_WEIGHTS.path for send in world.sent)
    assert (answer.success, gates(world), world.machine.fleet.committed) == (False, [False, False], BASE)


def test_pushes_without_a_version_are_compared_whatever_the_policy_says() -> None:
    """Only checksums show that a part came from a trainer that died."""
    for label, compared in ((None, True), ("7", False)):
        world = make()
        world.policy = world.policy.model_copy(update={"verify": Verify.OFF})
        world.send_intent()
        assert push(world, "a", label).success
        assert any(send.path == ControlCall.CHECK_WEIGHTS.path for send in world.sent) is compared


def test_different_versions_at_different_engines_are_no_version() -> None:
    world = make()
    assert feed(world, "e0", "a", "7").success
    answer = feed(world, "e1", "a", "8")
    assert (answer.status, "version 8, and others version 7" in answer.message) == (400, True)
    world.settle()
    assert gates(world) == [False, False]
    assert push(world, "b", "9").success
    assert gates(world) == [True, True]


def test_tensors_of_the_next_step_are_not_mixed_with_those_of_one_that_never_ended() -> None:
    world = make()
    assert feed(world, "e0", "old").success
    assert at(world, "e0", rq.ResumeMemory(CACHE)).success
    # The trainer died before it came to e1; its successor begins with e0.
    assert at(world, "e0", tensors("new")).success
    assert at(world, "e0", rq.Flush()).fleet["waits_for"] == ["e1"]
    last = world.machine.fleet.last_update
    assert last is not None
    assert (last.outcome, "e0 was sent new tensors before engine e1" in last.message) == (UpdateOutcome.FAILED, True)
    assert feed(world, "e1", "new").success
    assert at(world, "e1", rq.Flush()).success
    world.settle()
    assert held(world) == [["new"], ["new"]]
    assert at(world, "e1", rq.ResumeMemory(CACHE)).success
    assert gates(world) == [True, True]


def test_an_engine_that_is_woken_again_after_its_tensors_begins_again() -> None:
    world = make()
    assert feed(world, "e0", "old").success
    assert at(world, "e0", rq.ResumeMemory(WEIGHTS)).success
    assert world.agents["e0"].state is EngineState.DIRTY
    assert world.machine.fleet.update is None
    assert push(world, "new").success
    assert held(world) == [["new"], ["new"]]


def test_an_engine_that_restarts_in_the_middle_ends_the_update_and_the_next_one_works() -> None:
    world = make()
    assert feed(world, "e0", "a").success
    world.agents["e0"].restart()
    world.settle()
    last = world.machine.fleet.last_update
    assert last is not None
    assert (last.outcome, "e0 was restarted" in last.message) == (UpdateOutcome.FAILED, True)
    assert gates(world) == [False, False], "what it was started with is not what its trainer has"
    assert push(world, "b").success
    assert gates(world) == [True, True]


def test_a_trainer_that_comes_to_one_engine_only_is_reported_after_the_idle_deadline() -> None:
    world = make()
    assert feed(world, "e0", "a").success
    assert at(world, "e0", rq.Flush()).success
    world.tick(world.policy.deadlines.idle_seconds + 1)
    world.settle()
    assert world.machine.fleet.update is None
    last = world.machine.fleet.last_update
    assert last is not None
    assert (last.outcome, "engine e1 had not got" in last.message) == (UpdateOutcome.FAILED, True), last.message


def test_a_flush_at_the_fleets_url_commits_what_all_engines_have_and_nothing_else() -> None:
    world = make()
    assert world.do(rq.ResumeMemory()).success
    assert at(world, "e0", tensors("a")).success
    answer = world.do(rq.Flush())
    assert (answer.status, "e1 had got no tensors" in answer.message) == (400, True)
    world.settle()
    for engine in world.agents:
        assert at(world, engine, tensors("b")).success
    assert at(world, "e0", rq.Flush()).success
    assert world.do(rq.Flush()).success
    assert (gates(world), held(world)) == ([True, True], [["b"]] * 2)


def test_a_fleet_of_which_some_may_be_missing_commits_without_the_one_that_failed() -> None:
    world = World([1, 1, 1], min_committed=2)
    world.mode = FleetMode.HYBRID
    world.send_intent()
    world.settle()
    assert world.do(rq.ResumeMemory()).success
    for engine in world.agents:
        assert at(world, engine, tensors("a")).success
    call = world.ask(AtEngine("e0", rq.Flush()))
    world.complete(broken=frozenset({"e0"}))
    world.drain()
    assert world.answers[call].fleet["waits_for"] == ["e1", "e2"]
    assert at(world, "e1", rq.Flush()).success
    answer = at(world, "e2", rq.Flush())
    assert (answer.success, list(answer.fleet["fenced"])) == (True, ["e0"])
    world.settle()
    assert gates(world) == [False, True, True]


@pytest.mark.parametrize("asleep", [True, False])
def test_a_new_coordinator_knows_which_engines_memory_the_trainer_has(asleep: bool) -> None:
    world = make()
    push(world, "a")
    if asleep:
        assert at(world, "e1", rq.ReleaseMemory(CACHE)).success
    world.start()
    world.settle()
    assert gates(world) == [True, not asleep]
    world.agents["e1"].restart()
    world.settle()
    assert world.agents["e1"].released == (["kv_cache"] if asleep else [])


def test_calls_that_are_not_for_this_fleet_are_refused_and_reach_no_engine() -> None:
    world = make()
    before = len(world.sent)
    wrong: list[tuple[rq.Request, int, str]] = [
        (rq.OpenGroup(group_body(world, "g")), 400, "spec.mode: Hybrid"),
        (rq.Update("g", "2", {"names": ["w"]}), 400, "spec.mode: Hybrid"),
        (rq.Begin(), 400, "at that engine's own URL"),
        (rq.End(), 400, "no weight update is open"),
        (AtEngine("e7", tensors("a")), 404, "its engines: e0, e1"),
        (AtEngine("e0", rq.Pause("abort")), 400, "fleet's URL"),
        (AtEngine("e0", rq.End()), 400, "no weight update is open on engine e0"),
        (AtEngine("e0", tensors("a")), 409, "resume_memory_occupation first"),
        (AtEngine("e0", rq.Tensors(None, {"serialized_named_tensors": ["a", "b"]})), 400, "2 entries, and engine e0 has 1 ranks"),
    ]
    for request, status, words in wrong:
        answer = world.do(request)
        assert (answer.status, words in answer.message) == (status, True), answer
    assert len(world.sent) == before


@pytest.mark.parametrize("mode", [None, FleetMode.COLOCATED])
def test_other_fleets_take_no_weights_at_an_engine(mode: FleetMode | None) -> None:
    world = World([1])
    world.mode = mode
    world.send_intent()
    world.settle()
    before = len(world.sent)
    answer = at(world, "e0", tensors("a"))
    assert (answer.status, len(world.sent)) == (400, before)


def test_a_judge_is_woken_and_put_to_sleep_at_its_own_url() -> None:
    world = World([1, 1])
    world.mode = FleetMode.COLOCATED
    world.send_intent()
    world.settle()
    assert at(world, "e0", rq.ResumeMemory(SLEEP)).success
    assert gates(world) == [True, False]
    assert at(world, "e0", rq.Flush()).success
    assert at(world, "e0", rq.ReleaseMemory(SLEEP)).success
    world.settle()
    assert gates(world) == [False, False]


def test_a_sleep_by_the_spec_goes_first() -> None:
    world = make()
    push(world, "a")
    world.set_state(FleetState.ASLEEP)
    world.drain()
    world.settle()
    assert at(world, "e0", tensors("b")).status == 409
    assert at(world, "e0", rq.ResumeMemory(WEIGHTS)).status == 409
    world.set_state(FleetState.ACTIVE)
    world.drain()
    world.settle()
    assert push(world, "c").success
    assert gates(world) == [True, True]


def push_steps(handle: str) -> list[rq.Call]:
    """Return the calls of a push to one engine."""
    return [rq.ResumeMemory(WEIGHTS), tensors(handle), rq.ResumeMemory(CACHE), rq.Flush()]


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_no_gate_opens_before_every_engine_has_the_same_push(data: st.DataObject) -> None:
    """Trainer ranks work side by side, each at its own engine; engines restart and fail at any moment; what failed begins again."""
    engines = data.draw(st.integers(1, 3))
    world = make(engines)
    pushes: dict[tuple[int, int], str] = {}
    for number in range(1, data.draw(st.integers(1, 4)) + 1):
        handle = f"push {number}"
        steps = {name: push_steps(handle) for name in world.agents}
        failed = False
        while any(steps.values()) and not failed:
            name = data.draw(st.sampled_from([name for name, left in steps.items() if left]))
            broken = frozenset({name}) if data.draw(st.integers(0, 15)) == 0 else frozenset()
            if data.draw(st.integers(0, 15)) == 0:
                world.agents[data.draw(st.sampled_from(sorted(world.agents)))].restart()
            call = world.ask(AtEngine(name, steps[name].pop(0)))
            while world.pending:
                world.complete(data.draw(st.integers(0, 3)), broken=broken)
                remember(world, pushes, handle)
            failed = call in world.answers and not world.answers[call].success
            check(world, pushes)
        world.settle()
        check(world, pushes)
        if data.draw(st.booleans()):
            for name in world.agents:
                at(world, name, rq.ReleaseMemory(SLEEP))
            world.settle()
    assert any(pushed(world, f"the last, {attempt}") for attempt in range(2)), "after a failure the trainer begins again once"
    world.settle()
    assert gates(world) == [True] * engines
    assert len({tuple(agent.handles) for agent in world.agents.values()}) == 1


def pushed(world: World, handle: str) -> bool:
    """Return True if a trainer that stops at the first error saw none."""
    return all(at(world, engine, step).success for step in push_steps(handle) for engine in world.agents)


def remember(world: World, pushes: dict[tuple[int, int], str], handle: str) -> None:
    committed = world.machine.fleet.committed
    if committed is not None and committed != BASE:
        pushes.setdefault((committed.run, committed.step), handle)


def check(world: World, pushes: dict[tuple[int, int], str]) -> None:
    for agent in world.agents.values():
        if agent.gate_open and agent.version is not None and agent.version != BASE:
            assert agent.handles == [pushes[agent.version.run, agent.version.step]]
