"""A fleet that shares its trainer's GPUs and takes no weights: when it sleeps, what wakes it, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from sglang_rollout.coordinator.update import events as ev
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.states import BASE, FleetMode, FleetState
from tests.properties.support.coordinator_world import World, group_body

VERL = ("kv_cache", "weights")
"""What verl's sleep and wake_up name."""


def make(engines: int = 2) -> World:
    world = World([1] * engines)
    world.mode = FleetMode.COLOCATED
    world.send_intent()
    world.settle()
    return world


def released(world: World) -> list[tuple[str, ...]]:
    return [tuple(agent.released) for agent in world.agents.values()]


def serving(world: World) -> list[bool]:
    return [agent.gate_open for agent in world.agents.values()]


def awake(tags: Iterable[str] = VERL) -> World:
    world = make()
    assert world.do(rq.ResumeMemory(tuple(tags))).success
    return world


def test_it_sleeps_from_the_start_until_it_is_woken_and_serves_when_that_is_answered() -> None:
    world = make()
    assert released(world) == [VERL] * 2
    assert serving(world) == [False] * 2
    answer = world.do(rq.ResumeMemory(VERL))
    assert answer.success, answer
    assert serving(world) == [True] * 2, "verl generates at once"
    assert {agent.version for agent in world.agents.values()} == {BASE}
    world.settle()
    assert serving(world) == [True] * 2, "and it is not put to sleep again"


def test_memory_may_come_back_in_parts() -> None:
    world = make()
    assert world.do(rq.ResumeMemory(("weights",))).success
    world.settle()
    assert released(world) == [("kv_cache",)] * 2
    assert world.do(rq.ResumeMemory(("kv_cache",))).success
    assert serving(world) == [True] * 2


def test_a_trainer_puts_it_to_sleep_and_wakes_it_again_and_again() -> None:
    world = awake()
    for tags in (VERL, (), VERL):
        assert world.do(rq.ReleaseMemory(tags)).success
        world.settle()
        assert serving(world) == [False] * 2
        assert world.do(rq.ResumeMemory(tags)).success
        world.settle()
        assert serving(world) == [True] * 2


def test_the_record_tells_engines_that_are_being_compared_from_lost_ones() -> None:
    world = awake()
    for _ in range(2):
        assert world.do(rq.ReleaseMemory(VERL)).success
        world.ask(rq.ResumeMemory(VERL))
        compared = False
        while world.pending:
            compared = compared or getattr(world.pending[0], "path", "") == ControlCall.CHECK_WEIGHTS.path
            world.complete()
            world.tick(0.1)
            assert world.record is not None
            for row in world.record.engines:
                assert row.gate_open or row.released or row.comparing, row
        assert compared
        assert world.record is not None
        assert not any(row.comparing for row in world.record.engines)


def test_an_engine_that_restarts_while_the_trainer_has_the_memory_gives_it_back() -> None:
    world = awake()
    assert world.do(rq.ReleaseMemory()).success
    world.agents["e1"].restart()
    world.settle()
    assert set(released(world)[1]) == {"kv_cache", "weights", "cuda_graph"}
    assert world.do(rq.ResumeMemory()).success
    assert serving(world) == [True] * 2


def test_an_engine_that_restarts_while_the_fleet_is_awake_serves() -> None:
    world = awake()
    world.agents["e1"].restart()
    world.settle()
    assert (serving(world), released(world)[1]) == ([True] * 2, ())


@pytest.mark.parametrize("asleep", [True, False])
def test_a_new_coordinator_knows_whether_the_trainer_has_the_memory(asleep: bool) -> None:
    world = awake()
    if asleep:
        assert world.do(rq.ReleaseMemory(VERL)).success
    world.start()
    world.settle()
    assert serving(world) == [not asleep] * 2
    if asleep:
        assert world.do(rq.ResumeMemory(VERL)).success
        assert serving(world) == [True] * 2, "the record has the checksums"


def test_a_coordinator_that_dies_before_any_call_is_followed_by_one_that_makes_the_call() -> None:
    world = awake()
    world.ask(rq.ReleaseMemory(VERL))
    written = False
    while not any(isinstance(effect, ev.Send) and effect.path == ControlCall.RELEASE_MEMORY.path for effect in world.pending):
        written = written or isinstance(world.pending[0], ev.Write)
        world.complete()
    assert written, "before any engine receives it"
    world.start()
    world.settle()
    assert released(world) == [VERL] * 2


def test_an_engine_that_refuses_to_sleep_is_asked_again() -> None:
    world = World([1])
    world.mode = FleetMode.COLOCATED
    world.send_intent()
    world.tick(0.5)
    world.sync_all()
    world.drain(failing=ControlCall.RELEASE_MEMORY.path, engines={"e0"})
    assert released(world) == [()]
    world.tick(20.0)
    world.settle()
    assert released(world) == [VERL]


def test_an_engine_that_comes_back_with_other_bytes_is_named_and_stays_closed() -> None:
    world = awake()
    world.agents["e1"].backup = False
    assert world.do(rq.ReleaseMemory(VERL)).success
    answer = world.do(rq.ResumeMemory(VERL))
    assert (answer.status, answer.fleet["unproved"], "restart it" in answer.message) == (502, ["e1"], True)
    world.settle()
    assert world.record is not None
    assert [row.comparing for row in world.record.engines] == [False, False], "it is known to be lost"
    assert serving(world) == [True, False]


def test_weights_without_a_checksum_to_compare_are_not_released() -> None:
    world = World([1])
    world.mode = FleetMode.COLOCATED
    world.send_intent()
    world.tick(0.5)
    world.sync_all()
    world.drain(failing=ControlCall.CHECK_WEIGHTS.path, engines=world.agents)
    call = world.ask(rq.ReleaseMemory())
    world.drain(failing=ControlCall.CHECK_WEIGHTS.path, engines=world.agents)
    assert (world.answers[call].status, "Nothing was released" in world.answers[call].message) == (502, True)
    assert released(world) == [()]


def test_an_engine_that_comes_back_from_another_image_is_compared_with_itself() -> None:
    world = awake()
    assert world.do(rq.ReleaseMemory(VERL)).success
    world.agents["e1"].restart()
    world.agents["e1"].checksum = "of another image"
    world.settle()
    assert released(world) == [VERL] * 2
    world.start()
    world.settle()
    assert world.do(rq.ResumeMemory(VERL)).success
    assert serving(world) == [True] * 2


@pytest.mark.parametrize(
    "request_",
    [
        rq.Begin(),
        rq.Update("g", "2", {"names": ["w"]}),
        rq.End(),
        rq.FromDisk("/x", None, {}),
        rq.SetLabel("2"),
        rq.NewRun(),
        rq.CloseGroup("g"),
    ],
    ids=lambda request: type(request).__name__,
)
@pytest.mark.parametrize("woken", [True, False], ids=["awake", "asleep"])
def test_a_call_about_weights_is_refused_with_the_reason_and_reaches_no_engine(request_: rq.Request, woken: bool) -> None:
    world = awake() if woken else make()
    before = len(world.sent)
    for request in (request_, rq.OpenGroup(group_body(world, "g"))):
        answer = world.do(request)
        assert (answer.status, "spec.mode: Colocated" in answer.message) == (400, True), answer
    assert len(world.sent) == before


def test_a_trainer_may_pause_and_continue() -> None:
    world = awake()
    assert world.do(rq.Pause("abort", {"mode": "abort"})).success
    assert world.do(rq.Continue()).success
    world.settle()
    assert serving(world) == [True] * 2


def test_a_sleep_by_the_spec_ends_in_the_state_of_the_trainer() -> None:
    world = awake()
    for last, wanted in ((None, True), (rq.ReleaseMemory(VERL), False)):
        world.set_state(FleetState.ASLEEP)
        world.drain()
        world.settle()
        if last is not None:
            assert world.do(last).success
        assert serving(world) == [False] * 2
        world.set_state(FleetState.ACTIVE)
        world.drain()
        world.settle()
        assert serving(world) == [wanted] * 2


def test_a_fleet_with_gpus_of_its_own_is_not_put_to_sleep() -> None:
    world = World([1])
    world.settle()
    assert (serving(world), released(world)) == ([True], [()])
    assert world.record is not None
    assert world.record.released_to_trainer is None
