"""Engines that restarted, or came too late for the trainer's group, get the committed version from a shared volume."""

from __future__ import annotations

import pytest

from sglang_rollout.api.weights_spec import CatchUp, Weights
from sglang_rollout.coordinator.update import events as ev
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.ports import AGENT_CHECKPOINT
from sglang_rollout.wire.states import Version
from tests.properties.support.coordinator_world import SNAPSHOTS, World

TENSORS = {"names": ["w"]}


def make(engines: int = 2, *, parallel: int = 4) -> World:
    """A fleet that serves version 1."""
    world = World([1] * engines)
    world.policy = Weights(catch_up=CatchUp(disk=SNAPSHOTS, parallel=parallel))
    world.send_intent()
    for agent in world.agents.values():
        agent.stocked = True
    world.sync_all()
    push(world, "g", "1")
    return world


def push(world: World, group: str, label: str) -> None:
    size = world.machine.fleet.table.world_size
    body = {"master_address": "10.0.0.9", "master_port": 7, "rank_offset": 1, "group_name": group, "world_size": size}
    for request in (rq.OpenGroup(body), rq.Begin(), rq.Update(group, label, TENSORS), rq.End()):
        answer = world.do(request)
        assert answer.success, answer.message


def restart(world: World, *names: str) -> None:
    for name in names:
        world.agents[name].restart()
    world.sync_all()


def run_to(world: World, path: str, name: str) -> int:
    """Carry out effects until this call to this engine is under way. Returns its index among the pending effects."""
    for _ in range(100):
        for index, effect in enumerate(world.pending):
            if isinstance(effect, ev.Send) and effect.path == path and name in effect.bodies:
                return index
        world.complete()
    raise AssertionError(f"{path} was not called")


def test_a_restarted_engine_serves_the_committed_version_again_without_a_trainer() -> None:
    world = make()
    restart(world, "e1")
    assert not world.agents["e1"].gate_open
    world.drain()
    agent = world.agents["e1"]
    assert agent.gate_open
    assert (agent.version, agent.content) == (Version(run=1, step=1, label="1"), world.agents["e0"].content)


def test_a_whole_fleet_that_restarted_comes_back() -> None:
    world = make(3)
    restart(world, "e0", "e1", "e2")
    world.drain()
    assert all(agent.gate_open for agent in world.agents.values())


def test_as_many_engines_catch_up_at_a_time_as_the_policy_allows() -> None:
    world = make(4, parallel=2)
    restart(world, "e0", "e1", "e2", "e3")
    loading = [effect for effect in world.pending if isinstance(effect, ev.Send) and effect.path == AGENT_CHECKPOINT]
    assert len(loading) == 2
    world.drain()
    assert all(agent.gate_open for agent in world.agents.values())


def test_a_trainer_pushes_while_an_engine_loads_and_the_engine_follows() -> None:
    world = make(3)
    restart(world, "e2")
    held = world.pending.pop(run_to(world, ControlCall.UPDATE_DISK.path, "e2"))
    assert world.machine.fleet.table.world_size == 3, "an engine that loads is no member"
    push(world, "h", "2")
    assert [agent.gate_open for agent in world.agents.values()] == [True, True, False]
    world.pending.append(held)
    world.drain()
    assert world.agents["e2"].version == Version(run=1, step=2, label="2"), "it loaded version 1, found it old, and loaded 2"
    assert world.agents["e2"].gate_open


def test_a_missing_snapshot_is_reported_and_tried_again_less_and_less_often() -> None:
    world = make()
    world.agents["e1"].stocked = False
    restart(world, "e1")
    world.drain()
    row = world.machine.fleet.engines["e1"].row()
    assert "it could not load version 1" in row.message
    assert "tries again in 10 s" in row.message
    asked = len(world.sent)
    world.tick(9)
    assert len(world.sent) == asked
    world.tick(2)
    world.drain()
    assert "tries again in 20 s" in world.machine.fleet.engines["e1"].row().message
    world.agents["e1"].stocked = True
    world.tick(21)
    world.drain()
    assert world.agents["e1"].gate_open


def test_a_folder_that_holds_something_else_is_not_served() -> None:
    world = make()
    restart(world, "e1")
    world.agents["e1"].checksum = "other"
    world.drain()
    assert not world.agents["e1"].gate_open
    assert "held other weights" in world.machine.fleet.engines["e1"].row().message
    assert world.machine.fleet.table.world_size == 3, "it takes part in the next push"


def test_an_engine_that_dies_while_it_loads_stops_no_other_engine() -> None:
    world = make()
    restart(world, "e1")
    index = run_to(world, ControlCall.UPDATE_DISK.path, "e1")
    world.agents["e1"].up = False
    world.complete(index, broken=frozenset({"e1"}))
    world.sync_all()
    world.drain()
    assert world.agents["e0"].gate_open
    restart(world, "e1")
    world.tick(11)
    world.drain()
    assert world.agents["e1"].gate_open


def test_in_a_paused_fleet_a_joiner_is_paused() -> None:
    world = make()
    restart(world, "e1")
    held = world.pending.pop(run_to(world, ControlCall.UPDATE_DISK.path, "e1"))
    assert world.do(rq.Pause("retract", {"mode": "retract"})).success
    world.pending.append(held)
    world.drain()
    assert all(agent.paused for agent in world.agents.values())
    assert world.do(rq.Continue()).success
    assert not any(agent.paused for agent in world.agents.values())
    assert all(agent.gate_open for agent in world.agents.values())


def test_without_a_folder_no_engine_loads_anything() -> None:
    world = World([1])
    world.sync_all()
    push(world, "g", "1")
    restart(world, "e0")
    assert not world.pending


@pytest.mark.parametrize("by_another", [False, True])
def test_what_the_fleet_loaded_from_disk_is_where_a_restarted_engine_looks(by_another: bool) -> None:
    world = World([1, 1])
    world.sync_all()
    answer = world.do(rq.FromDisk(SNAPSHOTS, "5", {}))
    assert answer.success, answer.message
    if by_another:
        world.start()
        world.sync_all()
    restart(world, "e1")
    world.drain()
    assert world.agents["e1"].version == Version(run=1, step=5, label="5")
    assert world.agents["e1"].gate_open


def test_an_engine_that_is_scaled_away_while_it_loads_is_forgotten() -> None:
    world = make()
    restart(world, "e1")
    run_to(world, ControlCall.UPDATE_DISK.path, "e1")
    world.engines = world.engines[:1]
    world.send_intent()
    world.drain()
    assert list(world.machine.fleet.engines) == ["e0"]
    assert world.agents["e0"].gate_open


def test_joiners_are_compared_with_a_peer_that_is_asked_once() -> None:
    """An engine takes one control call at a time: a second one would be refused, and the joiner that asked left unverified."""
    world = make(4)
    restart(world, "e1", "e2", "e3")
    before = len(world.sent)
    for _ in range(200):
        asking = [
            effect
            for effect in world.pending
            if isinstance(effect, ev.Send) and effect.path == ControlCall.CHECK_WEIGHTS.path and "e0" in effect.bodies
        ]
        assert len(asking) <= 1
        if not world.pending:
            break
        world.complete()
    assert sum(send.path == ControlCall.CHECK_WEIGHTS.path and "e0" in send.bodies for send in world.sent[before:]) == 1
    assert all(agent.gate_open for agent in world.agents.values())


def test_a_joiner_that_cannot_be_compared_stays_closed_and_reports_why() -> None:
    world = make(2)
    restart(world, "e1")
    world.complete(run_to(world, ControlCall.CHECK_WEIGHTS.path, "e0"), broken=frozenset({"e0"}))
    world.drain()
    assert not world.agents["e1"].gate_open
    assert "engine e0, with which it had to be compared, did not return its checksums" in world.machine.fleet.engines["e1"].note


def test_a_process_group_whose_member_was_restarted_is_refused_with_a_code() -> None:
    world = make()
    restart(world, "e1")
    world.drain()
    answer = world.do(rq.Begin())
    assert (answer.status, answer.fleet["reason"]) == (400, "EngineLost")
