"""A trainer that dies, stops or is silent: the fleet waits no longer than its lease, and cuts off no trainer that lives."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_rollout.api.weights_spec import OnLoss, TrainerLease, Weights
from sglang_rollout.coordinator.update import events as ev
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.ports import AGENT_PREFLIGHT
from sglang_rollout.wire.record import UpdateOutcome
from sglang_rollout.wire.states import Version
from tests.properties.support.coordinator_world import World

ALL = frozenset({"e0", "e1"})
TENSORS = {"names": ["w"]}


def make(**policy: Any) -> World:
    """Two engines that hold version 1, and an open group g."""
    world = World([1, 1])
    world.policy = Weights(**policy)
    world.send_intent()
    world.sync_all()
    size = world.machine.fleet.table.world_size
    body = {"master_address": "10.0.0.9", "master_port": 7, "rank_offset": 1, "group_name": "g", "world_size": size}
    assert world.do(rq.OpenGroup(body)).success
    assert world.do(rq.Begin()).success
    assert world.do(rq.Update("g", "1", TENSORS)).success
    assert world.do(rq.End()).success
    return world


def probe(world: World) -> int:
    """Return the index of the call that probes the trainer's store; fail if there is none."""
    return next(index for index, effect in enumerate(world.pending) if getattr(effect, "path", "") == AGENT_PREFLIGHT)


def probing(world: World) -> bool:
    return any(getattr(effect, "path", "") == AGENT_PREFLIGHT for effect in world.pending)


def is_paused(world: World) -> bool:
    return world.machine.fleet.pause is not None


def given_up(world: World) -> str:
    """Return why the pause or the update has ended."""
    assert world.machine.fleet.pause is None
    assert world.machine.fleet.last_update is not None
    return world.machine.fleet.last_update.message


@pytest.fixture
def transfer() -> tuple[World, int]:
    """A bucket is under way: all engines wait for the trainer's broadcast."""
    world = make()
    assert world.do(rq.Begin()).success
    call = world.ask(rq.Update("g", "2", TENSORS))
    assert [getattr(effect, "path", "") for effect in world.pending] == [ControlCall.UPDATE_DISTRIBUTED.path]
    return world, call


def test_a_trainer_that_died_in_a_broadcast_holds_engines_no_longer_than_its_lease(transfer: tuple[World, int]) -> None:
    world, call = transfer
    world.tick(19)
    assert not probing(world)
    world.tick(2)
    world.complete(probe(world), broken=ALL)
    answer = world.answers[call]
    assert answer.status == 400
    assert "the trainer is gone: its store at 10.0.0.9:7 takes no connection" in answer.message
    world.drain()
    assert world.machine.fleet.update is None
    assert world.machine.fleet.committed == Version(run=1, step=1, label="1")
    assert not any(agent.gate_open for agent in world.agents.values()), "both hold a mixture"


def test_a_broken_connection_makes_the_coordinator_probe_at_once(transfer: tuple[World, int]) -> None:
    world, call = transfer
    world.disconnect(call)
    world.complete(probe(world), broken=ALL)
    assert world.machine.fleet.update is None


def test_a_slow_transfer_of_a_trainer_that_lives_continues(transfer: tuple[World, int]) -> None:
    world, call = transfer
    for _ in range(5):
        world.tick(21)
        world.complete(probe(world))
        assert call not in world.answers
    world.drain()
    assert world.answers[call].success


def test_heartbeats_make_probes_unnecessary(transfer: tuple[World, int]) -> None:
    world, _ = transfer
    for _ in range(10):
        world.tick(10)
        world.feed(ev.Beat(world.now))
        assert not probing(world)


def test_a_call_during_a_probe_proves_that_the_trainer_lives() -> None:
    world = make()
    assert world.do(rq.Pause("retract", {})).success
    world.tick(21)
    index = probe(world)
    call = world.ask(rq.Flush())
    world.complete(index, broken=ALL)
    world.drain()
    assert world.answers[call].success
    assert is_paused(world), "it lives: its pause is its own"


def test_a_stopped_trainer_whose_store_still_accepts_has_an_absolute_limit() -> None:
    world = make()
    assert world.do(rq.Pause("retract", {})).success
    for _ in range(11):
        world.tick(10)
        world.drain()
    assert is_paused(world)
    world.tick(11)
    world.drain()
    assert not is_paused(world)
    assert all(agent.gate_open and not agent.paused for agent in world.agents.values())
    last = world.machine.fleet.last_update
    assert last is not None
    assert last.outcome is UpdateOutcome.ABORTED
    assert last.message.startswith("the pause was given up: nothing was heard of the trainer for ")


def test_heartbeats_do_not_extend_a_pause_forever() -> None:
    world = make()
    assert world.do(rq.Pause("retract", {})).success
    for _ in range(179):
        world.tick(10)
        world.feed(ev.Beat(world.now))
    assert world.machine.fleet.pause is not None
    world.tick(20)
    world.drain()
    assert world.machine.fleet.pause is None


def test_no_pod_probes_an_idle_trainer_of_a_fleet_that_keeps_serving() -> None:
    world = make()
    world.tick(1000)
    assert not probing(world)
    assert all(agent.gate_open for agent in world.agents.values())


def test_on_loss_pause_ends_with_the_next_trainer() -> None:
    world = make(trainer_lease=TrainerLease(ttl_seconds=5, on_loss=OnLoss.PAUSE))
    world.tick(6)
    world.complete(probe(world), broken=ALL)
    world.drain()
    assert all(agent.paused for agent in world.agents.values())
    for _ in range(30):
        world.tick(100)
        world.drain()
    assert all(agent.paused for agent in world.agents.values()), "the policy's pause has no lease"
    assert world.record is not None
    assert world.record.waits_for_trainer
    assert world.do(rq.Flush()).success
    assert not any(agent.paused for agent in world.agents.values())
    assert not world.record.waits_for_trainer


def test_on_loss_pause_outlives_the_coordinator() -> None:
    world = make(trainer_lease=TrainerLease(ttl_seconds=5, on_loss=OnLoss.PAUSE))
    world.tick(6)
    world.complete(probe(world), broken=ALL)
    world.drain()
    world.now += 1
    world.start()
    world.sync_all()
    for _ in range(5):
        world.tick(100)
        world.drain()
        world.sync_all()
    assert all(agent.paused for agent in world.agents.values()), "no trainer has called"
    assert world.record is not None
    assert world.record.waits_for_trainer
    world.tick(1)
    assert world.do(rq.Flush()).success
    world.sync_all()
    assert not any(agent.paused for agent in world.agents.values())
    assert not world.record.waits_for_trainer


def test_a_trainer_that_dies_after_its_last_call_costs_nothing() -> None:
    """The commit does not need it any more; and an idle fleet without a trainer keeps serving."""
    world = make()
    assert world.do(rq.Begin()).success
    assert world.do(rq.Update("g", "2", TENSORS)).success
    call = world.ask(rq.End())
    world.disconnect(call)
    index = probe(world)
    world.complete(index, broken=ALL)
    world.drain()
    world.tick(1)
    world.drain()
    assert world.machine.fleet.committed == Version(run=1, step=2, label="2")
    assert world.machine.fleet.pause is None
    assert all(agent.gate_open and not agent.paused for agent in world.agents.values())


def test_groups_of_dead_trainers_are_closed_when_the_next_one_opens_its_own() -> None:
    world = make()
    size = world.machine.fleet.table.world_size
    body = {"master_address": "10.0.0.9", "master_port": 8, "rank_offset": 1, "group_name": "h", "world_size": size}
    call = world.ask(rq.OpenGroup(body))
    world.complete(probe(world))  # the new trainer's store answers
    world.complete(probe(world), broken=ALL)  # that of the one before does not
    world.drain()
    assert world.answers[call].success
    assert list(world.machine.fleet.groups) == ["h"]
    assert all(agent.groups == ["h"] for agent in world.agents.values())


def test_a_trainer_that_pauses_and_dies_is_noticed_after_its_lease_however_long_its_group_was_idle() -> None:
    world = make()
    world.tick(3600)
    assert world.do(rq.Pause("retract", {})).success
    world.tick(21)
    world.complete(probe(world), broken=ALL)
    world.drain()
    assert "the trainer is gone: its store at 10.0.0.9:7 takes no connection" in given_up(world)


def test_the_store_of_a_dead_trainer_ends_no_pause_of_the_next_one() -> None:
    """A trainer that has just paused lives: a store that accepts no connection then belongs to another trainer."""
    world = make()
    world.tick(3600)
    call = world.ask(rq.Pause("retract", {}))
    world.complete()
    assert world.answers[call].success
    world.complete(probe(world), broken=ALL)
    for _ in range(5):
        world.tick(21)
        assert not world.pending
    assert world.machine.fleet.pause is not None
    world.tick(21)
    world.drain()
    assert "nothing was heard of the trainer" in given_up(world)


def test_a_trainer_that_dies_during_the_probe_is_not_taken_for_another() -> None:
    world = make()
    call = world.ask(rq.Pause("retract", {}))
    world.disconnect(call)
    world.complete()
    world.complete(probe(world), broken=ALL)
    world.drain()
    assert world.machine.fleet.pause is None, "its connection broke, and its store is dead"
    world = make()
    call = world.ask(rq.Pause("retract", {}))
    world.complete()
    flush = world.ask(rq.Flush())
    world.disconnect(flush)
    world.complete(probe(world), broken=ALL)
    world.complete(probe(world), broken=ALL)  # asked again at once: its connection broke since it paused
    world.drain()
    assert world.machine.fleet.pause is None


SLOW = {"a checkpoint is read": rq.FromDisk("/ckpt", "2", {}), "a store is waited for": None}


def slow(world: World, what: str) -> int:
    """A trainer pauses, and then makes a call that engines' pods prepare for minutes."""
    assert world.do(rq.Pause("retract", {})).success
    size = world.machine.fleet.table.world_size
    body = {"master_address": "10.0.0.9", "master_port": 8, "rank_offset": 1, "group_name": "h", "world_size": size}
    call = world.ask(SLOW[what] or rq.OpenGroup(body))
    assert len(world.pending) == 1
    return call


@pytest.mark.parametrize("what", SLOW)
def test_a_trainer_whose_call_is_under_way_is_not_idle(what: str) -> None:
    world = make()
    call = slow(world, what)
    for _ in range(13):
        world.tick(21)
        assert len(world.pending) == 1, "no pod probes a store: the call proves that the trainer lives"
        assert world.machine.fleet.pause is not None
    world.drain()
    assert world.answers[call].success
    world.tick(119)
    world.drain()
    assert world.machine.fleet.pause is not None, "it has just been answered"


def test_a_trainer_whose_call_is_refused_late_keeps_its_pause() -> None:
    world = make()
    call = slow(world, "a checkpoint is read")
    world.tick(150)
    world.complete(broken=ALL)
    assert not world.answers[call].success
    world.drain()
    assert world.machine.fleet.pause is not None


def test_a_call_that_is_under_way_does_not_extend_a_pause_forever() -> None:
    world = make()
    slow(world, "a checkpoint is read")
    world.tick(1801)
    world.complete(1)
    assert world.machine.fleet.pause is None
    assert world.machine.fleet.last_update is not None
    assert "deadlines.totalSeconds" in world.machine.fleet.last_update.message


def test_a_call_that_its_trainer_has_left_proves_nothing() -> None:
    world = make()
    world.disconnect(slow(world, "a checkpoint is read"))
    world.tick(21)
    world.complete(probe(world), broken=ALL)
    world.drain()
    assert world.machine.fleet.pause is None


def test_a_trainer_that_opens_its_group_at_the_address_of_a_dead_one_is_noticed_when_it_dies() -> None:
    world = make()
    call = world.ask(rq.Pause("retract", {}))
    world.complete()
    assert world.answers[call].success
    world.complete(probe(world), broken=ALL)  # no process listens there yet
    size = world.machine.fleet.table.world_size
    body = {"master_address": "10.0.0.9", "master_port": 7, "rank_offset": 1, "group_name": "h", "world_size": size}
    assert world.do(rq.OpenGroup(body)).success
    world.tick(21)
    world.complete(probe(world), broken=ALL)
    world.drain()
    assert world.machine.fleet.pause is None


@pytest.mark.parametrize("request_", [rq.Begin(), rq.Pause("retract", {})])
def test_the_store_of_another_trainer_keeps_no_lease_of_a_dead_holder(request_: rq.Request) -> None:
    world = World([1, 1])
    world.sync_all()
    body = {"master_port": 7, "rank_offset": 1, "world_size": world.machine.fleet.table.world_size}
    assert world.do(rq.OpenGroup({**body, "group_name": "a", "master_address": "10.0.0.1"}), "ml/Job/anne").success
    world.tick(600)
    world.drain()
    assert world.do(rq.OpenGroup({**body, "group_name": "b", "master_address": "10.0.0.2"}), "ml/Job/ben").success
    assert world.do(request_, "ml/Job/ben").success
    world.tick(21)
    index = probe(world)
    effect = world.pending[index]
    assert isinstance(effect, ev.Send)
    assert {body["host"] for body in effect.bodies.values()} == {"10.0.0.2"}
    world.complete(index, broken=ALL)
    world.drain()
    assert (world.machine.fleet.update, world.machine.fleet.pause) == (None, None)
    assert not probing(world)
