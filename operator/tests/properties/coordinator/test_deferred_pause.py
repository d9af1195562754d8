"""A trainer's pause with ``staging.trainerPause: Defer``: requests end once, and engines generate until they load the version."""

from __future__ import annotations

import pytest

from sglang_rollout.api.weights_spec import TrainerPause
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.phases import Phase
from sglang_rollout.coordinator.update.store import STORE
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.ports import AGENT_ACTIVATE
from sglang_rollout.wire.record import UpdateOutcome, UpdateReason
from sglang_rollout.wire.states import FleetState
from tests.properties.support.staged_world import TENSORS, StagedWorld

RETRACT = rq.Pause("retract", {"mode": "retract"})


@pytest.fixture
def world() -> StagedWorld:
    """Two engines that serve version 1, and an open process group."""
    made = StagedWorld(2, trainer_pause=TrainerPause.DEFER)
    assert made.push("1").success
    return made


def generates(world: StagedWorld, version: str) -> bool:
    """Return whether every engine serves this version now, and none is paused."""
    return all(agent.gate_open and not agent.paused and str(agent.version) == version for agent in world.agents.values())


def test_engines_generate_with_the_old_version_until_the_trainer_commits(world: StagedWorld) -> None:
    fleet = world.machine.fleet
    sent = len(world.sent)
    answer = world.do(RETRACT)
    assert (answer.success, answer.fleet["deferred"]) == (True, True)
    calls = [(send.path, body.get("mode")) for send in world.sent[sent:] for name, body in send.bodies.items() if name != STORE]
    assert calls == [(ControlCall.PAUSE.path, "retract")] * 2 + [(ControlCall.CONTINUE.path, None)] * 2
    assert (fleet.phase, fleet.defers_pause, generates(world, "1/1")) == (Phase.IDLE, True, True)
    assert world.send_tensors("2").success
    assert (fleet.phase, fleet.defers_pause, generates(world, "1/1")) == (Phase.STAGE, True, True)
    resumed = world.do(rq.Continue())
    assert (resumed.success, resumed.fleet["state"]) == (True, "committed")
    assert (fleet.phase, fleet.defers_pause, generates(world, "1/2")) == (Phase.IDLE, False, True)


def test_a_commit_before_the_continue_ends_the_deferred_pause(world: StagedWorld) -> None:
    assert world.do(RETRACT).success
    assert world.push("2").success
    assert (world.machine.fleet.defers_pause, generates(world, "1/2")) == (False, True)
    assert world.do(rq.Continue()).success
    assert generates(world, "1/2")


def test_a_flush_is_answered_without_the_engines_and_commits_nothing(world: StagedWorld) -> None:
    """An engine refuses to flush while requests run, and trainers repeat the call until it succeeds."""
    assert world.do(RETRACT).success
    sent = len(world.sent)
    assert world.do(rq.Flush()).success
    assert world.sent[sent:] == []
    assert world.send_tensors("2").success
    assert world.do(rq.Flush()).success
    assert (str(world.machine.fleet.committed), world.machine.fleet.phase) == ("1/1", Phase.STAGE)
    assert world.do(rq.Continue()).success
    assert world.do(rq.Flush()).success
    assert [send.path for send in world.sent].count(ControlCall.FLUSH_CACHE.path) == 1, "after the pause engines flush as before"


def test_a_label_may_be_set_between_the_pause_and_the_tensors(world: StagedWorld) -> None:
    for request in (RETRACT, rq.SetLabel("step-2")):
        assert world.do(request).success
    assert world.send_tensors().success
    assert world.do(rq.Continue()).success
    assert world.machine.fleet.committed is not None
    assert world.machine.fleet.committed.label == "step-2"
    assert not world.do(rq.SetLabel("other")).success


def test_a_second_pause_inside_an_update_begins_again(world: StagedWorld) -> None:
    assert world.do(RETRACT).success
    assert world.send_tensors("2").success
    assert world.do(RETRACT).success
    fleet = world.machine.fleet
    assert fleet.last_update is not None
    assert (fleet.last_update.reason, fleet.update, fleet.defers_pause) == (UpdateReason.UNEXPECTED_CALL, None, True)
    assert generates(world, "1/1")


def test_the_lease_of_a_trainer_that_is_gone_ends_its_deferred_pause(world: StagedWorld) -> None:
    assert world.do(RETRACT).success
    for _ in range(13):
        world.tick(10)
        world.drain()
    fleet = world.machine.fleet
    assert fleet.last_update is not None
    assert (fleet.defers_pause, fleet.last_update.outcome) == (False, UpdateOutcome.ABORTED)
    assert "weights.deadlines.idleSeconds" in fleet.last_update.message
    assert generates(world, "1/1")


def test_another_trainer_is_refused_while_the_pause_of_the_first_is_deferred(world: StagedWorld) -> None:
    assert world.do(rq.CloseGroup("g")).success
    assert world.do(RETRACT, "first").success
    assert not world.do(RETRACT, "second").success
    assert world.do(rq.Continue(), "first").success
    assert world.do(RETRACT, "second").success


def test_a_trainer_that_takes_over_commits_by_its_flush(world: StagedWorld) -> None:
    assert world.do(RETRACT, "first").success
    assert world.do(rq.Claim(take_over=True), "second").success
    fleet = world.machine.fleet
    assert (fleet.defers_pause, fleet.last_update and fleet.last_update.reason) == (False, UpdateReason.TAKEN_OVER)
    assert world.do(rq.Update("g", "2", TENSORS), "second").success
    assert world.do(rq.Flush(), "second").success
    assert generates(world, "1/2")


def test_a_paused_fleet_stays_paused(world: StagedWorld) -> None:
    world.state = FleetState.PAUSED
    world.send_intent()
    world.settle()
    assert all(agent.paused for agent in world.agents.values())
    answer = world.do(RETRACT)
    assert (answer.success, "deferred" in answer.fleet) == (True, False)
    assert all(agent.paused for agent in world.agents.values())


def test_a_pause_that_waits_for_its_turn_changes_no_load_in_turn() -> None:
    world = StagedWorld(4, in_turn=1, trainer_pause=TrainerPause.DEFER)
    assert world.push("1").success
    world.settle()
    sent = len(world.sent)
    for request in (rq.Begin(), rq.Update("g", "2", TENSORS)):
        assert world.do(request).success
    commit = world.ask(rq.End())
    pause = world.ask(RETRACT)
    world.drain()
    assert (world.answers[commit].success, world.answers[pause].fleet["deferred"]) == (True, True)
    assert [len(send.bodies) for send in world.sent[sent:] if send.path == AGENT_ACTIVATE] == [1, 1, 1, 1]


def test_engines_that_load_in_turn_do_so_under_a_deferred_pause() -> None:
    world = StagedWorld(3, min_committed=1, in_turn=1, trainer_pause=TrainerPause.DEFER)
    assert world.push("1").success
    world.settle()
    assert world.do(RETRACT).success
    answer = world.push("2")
    assert answer.success
    assert answer.fleet["waiting"], "the engines that wait generate"
    assert not any(agent.paused for agent in world.agents.values())
    world.settle()
    assert generates(world, "1/2")
