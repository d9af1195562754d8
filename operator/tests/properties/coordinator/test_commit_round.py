"""The last round of an update: one call sends an engine the committed version and resumes it."""

from __future__ import annotations

import pytest

from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.requests import Answer
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.ports import AGENT_ACK, AGENT_FENCE, AGENT_RUN, AGENT_SYNC
from sglang_rollout.wire.states import FleetState, Version
from tests.properties.support.coordinator_world import World, group_body, push
from tests.properties.support.simulated_agent import NAMES, SimulatedAgent

V2 = Version(run=1, step=2, label="2")


def make(engines: int = 2, min_committed: int | None = None) -> World:
    """A fleet that serves version 1."""
    world = World([1] * engines, min_committed)
    world.sync_all()
    push(world, "1")
    world.sent.clear()
    return world


def second_push(world: World, **broken: str) -> Answer:
    """Version 2; ``broken`` engines fail the call that stands beside their name."""
    assert world.do(rq.OpenGroup(group_body(world, "h"))).success
    assert world.do(rq.Begin()).success
    assert world.do(rq.Update("h", "2", {"names": ["w"]})).success
    call = world.ask(rq.End())
    while world.pending:
        path = getattr(world.pending[0], "path", "")
        world.complete(broken=frozenset(name for name, fails in broken.items() if fails == path))
    return world.answers[call]


def engines_called(world: World, path: str) -> set[str]:
    """Return the engines that received this call."""
    return {name for send in world.sent if send.path == path for name in send.bodies}


def runs(agent: SimulatedAgent) -> bool:
    """Return True if the engine generates from the committed version."""
    return agent.gate_open and not agent.paused and agent.version == V2


def test_after_the_acknowledgements_there_is_one_round() -> None:
    world = make()
    assert second_push(world).success
    paths = [send.path for send in world.sent]
    assert paths[paths.index(AGENT_ACK) + 1 :] == [AGENT_RUN]
    assert all(runs(agent) for agent in world.agents.values())


@pytest.mark.parametrize("buckets", [1, 7])
def test_a_push_costs_each_engine_one_call_per_step(buckets: int) -> None:
    world = make(engines=4)
    assert world.do(rq.OpenGroup(group_body(world, "h"))).success
    world.sent.clear()
    assert world.do(rq.Begin()).success
    for number in range(buckets):
        assert world.do(rq.Update("h", "2", {"names": [NAMES[number % 3]], "flush_cache": number == buckets - 1})).success
    assert world.do(rq.End()).success
    assert [send.path for send in world.sent] == [
        ControlCall.PAUSE.path,
        ControlCall.BEGIN_UPDATE.path,
        *[ControlCall.UPDATE_DISTRIBUTED.path] * buckets,
        ControlCall.END_UPDATE.path,
        AGENT_ACK,
        AGENT_RUN,
    ]
    assert all(set(send.bodies) == set(world.agents) for send in world.sent)


def test_checksums_cost_nothing_between_the_pushes_that_compare_them() -> None:
    world = World([1, 1])
    world.sync_all()
    every = world.policy.verify_every
    compared = []
    for number in range(1, every + 2):
        world.sent.clear()
        push(world, str(number))
        compared += [number] if ControlCall.CHECK_WEIGHTS.path in [send.path for send in world.sent] else []
    assert compared == [1, every + 1]


def test_an_engine_that_does_not_resume_is_named_and_fenced() -> None:
    world = make()
    answer = second_push(world, e1=AGENT_RUN)
    engines = answer.fleet["engines"]
    assert (answer.status, engines["e0"]["success"], engines["e1"]) == (200, True, {"success": False, "message": "the engine failed."})
    assert engines_called(world, AGENT_FENCE) == {"e1"}
    assert engines_called(world, ControlCall.CONTINUE.path) == set(), "it was asked once"
    assert runs(world.agents["e0"])


def test_an_engine_that_was_left_behind_receives_the_committed_version_and_stays_paused() -> None:
    world = make(min_committed=1)
    assert "e1" in second_push(world, e1=ControlCall.END_UPDATE.path).fleet["fenced"]
    assert (engines_called(world, AGENT_RUN), engines_called(world, AGENT_SYNC), engines_called(world, ControlCall.CONTINUE.path)) == (
        {"e0"},
        {"e1"},
        set(),
    )
    assert (world.agents["e1"].committed, world.agents["e1"].gate_open) == (V2, False)
    assert runs(world.agents["e0"])


def test_a_commit_does_not_end_the_pause_of_a_trainer() -> None:
    world = make()
    assert world.do(rq.Pause("abort", {"mode": "abort"})).success
    assert second_push(world).success
    assert engines_called(world, AGENT_RUN) | engines_called(world, ControlCall.CONTINUE.path) == set()
    assert all(agent.paused and agent.gate_open for agent in world.agents.values())
    assert world.do(rq.Continue({})).success
    assert all(runs(agent) for agent in world.agents.values())


def test_an_engine_without_its_cache_takes_weights_and_stays_paused() -> None:
    world = make()
    assert world.do(rq.ReleaseMemory(("kv_cache",))).success
    assert second_push(world).success
    assert engines_called(world, AGENT_RUN) | engines_called(world, ControlCall.CONTINUE.path) == set()
    assert all(agent.paused and agent.version == V2 and agent.committed == V2 for agent in world.agents.values())


def test_a_fleet_that_its_spec_pauses_takes_weights_and_stays_paused() -> None:
    world = make()
    world.set_state(FleetState.PAUSED)
    world.drain()
    assert second_push(world).success
    assert engines_called(world, AGENT_RUN) | engines_called(world, ControlCall.CONTINUE.path) == set()
    assert all(agent.paused and not agent.gate_open and agent.committed == V2 for agent in world.agents.values())
