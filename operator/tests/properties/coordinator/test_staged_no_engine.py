"""A trainer pushes with transport Staged while no engine is up: its calls succeed, and the commit waits for engines."""

from __future__ import annotations

import pytest

from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.sglang.api import MEMORY_TAGS
from sglang_rollout.wire.record import UpdateOutcome, UpdateReason
from sglang_rollout.wire.states import FleetState
from tests.properties.support.coordinator_world import World
from tests.properties.support.staged_world import TENSORS, StagedWorld, last, serves

PAUSE = rq.Pause("retract", {"mode": "retract"})


def stop_all(world: StagedWorld) -> None:
    """Let all engines end. Their agents still answer."""
    for agent in world.agents.values():
        agent.up = False
    world.settle()


def restart(world: StagedWorld, *names: str) -> None:
    for name in names or world.agents:
        world.agents[name].restart()
    world.sync_all()
    world.drain()


def served_world(engines: int = 2, min_committed: int | None = None) -> StagedWorld:
    """Return a fleet that serves version 1/1 and whose engines have all ended since."""
    world = StagedWorld(engines, min_committed)
    assert world.push("1").success
    assert serves(world, "1/1")
    stop_all(world)
    return world


def begin_commit(world: StagedWorld, label: str = "2") -> int:
    """Make the calls of a trainer that pauses and knows no sessions. Returns the number of the call that commits."""
    for request in (PAUSE, rq.Flush(), rq.Update("g", label, TENSORS)):
        answer = world.do(request)
        assert answer.success, (request, answer.message)
    call = world.ask(rq.Continue())
    world.drain()
    return call


def test_calls_of_an_unmodified_trainer_succeed_and_its_commit_waits_for_an_engine() -> None:
    world = served_world()
    call = begin_commit(world)
    world.tick(20)
    world.drain()
    assert call not in world.answers
    restart(world, "e1")
    answer = world.answers[call]
    assert (answer.success, answer.fleet["state"]) == (True, "committed"), answer.message
    restart(world, "e0")
    assert serves(world, "1/2")


def test_answers_say_that_no_engine_is_up() -> None:
    world = served_world()
    paused = world.do(PAUSE)
    assert (paused.status, paused.fleet["engines"], "No engine" in paused.message) == (200, [], True)
    flushed, resumed = world.do(rq.Flush()), world.do(rq.Continue())
    assert (flushed.status, "No engine" in flushed.message) == (200, True)
    assert (resumed.status, "No engine" in resumed.message) == (200, True)
    assert world.machine.fleet.pause is None
    restart(world)
    assert serves(world, "1/1")


def test_after_25_seconds_the_call_is_answered_with_a_staged_version_and_the_commit_still_waits() -> None:
    world = served_world()
    call = begin_commit(world)
    world.tick(24)
    world.drain()
    assert call not in world.answers
    world.tick(2)
    answer = world.answers[call]
    assert (answer.status, answer.fleet["state"], "Too few engines are up" in answer.message) == (200, "staged", True)
    world.tick(400)  # longer than deadlines.idleSeconds: the trainer is not needed any more
    world.drain()
    restart(world)
    assert last(world).outcome is UpdateOutcome.COMMITTED
    assert serves(world, "1/2")


def test_the_next_push_waits_for_the_commit() -> None:
    world = served_world()
    begin_commit(world)
    world.tick(26)
    paused = world.ask(PAUSE)
    world.drain()
    assert paused not in world.answers
    restart(world)
    assert world.answers[paused].success
    for request in (rq.Flush(), rq.Update("g", "3", TENSORS), rq.Continue()):
        assert world.do(request).success
    assert serves(world, "1/3")


def test_a_trainer_with_sessions_ends_its_pause_while_the_commit_waits() -> None:
    world = served_world()
    calls: list[rq.Call] = [PAUSE, rq.Begin(), rq.Update("g", "2", TENSORS), rq.End(), rq.Continue()]
    for request in calls[:3]:
        assert world.do(request).success
    for request in calls[3:]:
        call = world.ask(request)
        world.tick(26)
        assert (world.answers[call].success, world.answers[call].fleet["state"]) == (True, "staged")
    restart(world)
    assert serves(world, "1/2")


def test_a_commit_that_has_waited_for_the_time_of_a_copy_fails() -> None:
    world = served_world()
    begin_commit(world)
    world.tick(26)
    world.tick(601)
    world.drain()
    assert (last(world).outcome, last(world).reason) == (UpdateOutcome.FAILED, UpdateReason.ENGINE_LOST)
    assert "too few engines were up for 600 s" in last(world).message
    restart(world)
    assert serves(world, "1/1")
    assert world.push("3").success


@pytest.mark.parametrize("state", [FleetState.ASLEEP, FleetState.PAUSED])
def test_a_commit_does_not_wait_for_engines_that_cannot_come(state: FleetState) -> None:
    world = served_world()
    begin_commit(world)
    world.tick(26)
    world.set_state(state)
    world.tick(1)
    world.drain()
    if state is FleetState.PAUSED:
        restart(world)
        assert last(world).outcome is UpdateOutcome.COMMITTED, "paused engines take the version"
    else:
        assert (last(world).outcome, "spec.state" in last(world).message) == (UpdateOutcome.FAILED, True)


def test_an_engine_with_released_memory_fails_a_commit_that_was_answered() -> None:
    world = served_world()
    begin_commit(world)
    world.tick(26)
    world.agents["e0"].restart()
    world.agents["e0"].call("/release_memory_occupation", {"tags": list(MEMORY_TAGS)}, None, works=True)
    world.sync_all()
    world.drain()
    assert (last(world).outcome, last(world).reason) == (UpdateOutcome.FAILED, UpdateReason.ENGINE_FAILED)
    assert "released memory" in last(world).message


def test_the_commit_of_an_upload_is_refused_after_25_seconds_and_can_be_repeated() -> None:
    world = served_world()
    update = str(world.open_upload("2").fleet["update"])
    world.fill_upload(update)
    call = world.ask(rq.CommitUpload(update))
    world.tick(24)
    assert call not in world.answers
    world.tick(2)
    assert (world.answers[call].status, "stays open" in world.answers[call].message) == (503, True)
    restart(world)
    assert world.do(rq.CommitUpload(update)).success
    assert serves(world, "1/2")


def test_the_commit_waits_for_as_many_engines_as_min_committed_asks_for() -> None:
    world = served_world(3, min_committed=2)
    call = begin_commit(world)
    restart(world, "e0")
    assert call not in world.answers
    restart(world, "e2")
    assert world.answers[call].success


def test_a_commit_of_an_upload_may_be_repeated_while_it_waits() -> None:
    world = served_world()
    update = str(world.open_upload("2").fleet["update"])
    world.fill_upload(update)
    calls = [world.ask(rq.CommitUpload(update)) for _ in range(2)]
    world.drain()
    assert not world.answers.keys() & set(calls)
    restart(world)
    assert [(world.answers[call].status, world.answers[call].fleet["state"]) for call in calls] == [(200, "committed")] * 2
    assert serves(world, "1/2")


@pytest.mark.parametrize("ending", ["withdrawn", "store lost"])
def test_an_update_that_ends_while_its_commit_waits_is_not_committed(ending: str) -> None:
    world = served_world()
    update = str(world.open_upload("2").fleet["update"])
    world.fill_upload(update)
    call = world.ask(rq.CommitUpload(update))
    if ending == "withdrawn":
        assert world.do(rq.WithdrawUpload(update)).success
    else:
        world.store.restart()
        world.sync_all()
    world.drain()
    assert world.answers[call].status == 409
    assert last(world).reason in (UpdateReason.WITHDRAWN, UpdateReason.STORE_LOST)
    restart(world)
    assert serves(world, "1/1")


def test_while_a_commit_waits_the_spec_changes_and_other_trainers_are_refused() -> None:
    world = served_world(1)
    update = str(world.open_upload("2", caller="ml/Job/a").fleet["update"])
    world.fill_upload(update)
    call = world.ask(rq.CommitUpload(update), "ml/Job/a")
    world.tick(21)
    assert world.open_upload("3", caller="ml/Job/b").status == 409
    world.add_agent("e1")
    world.engines = [*world.engines, world.engines[0].model_copy(update={"name": "e1"})]
    world.generation += 1
    world.send_intent()
    world.sync_all()
    world.drain()
    assert world.answers[call].success, "a new engine takes the version"
    restart(world, "e0")
    assert serves(world, "1/2")


def test_a_trainer_takes_the_fleet_over_while_a_commit_waits() -> None:
    world = served_world()
    update = str(world.open_upload("2", caller="ml/Job/a").fleet["update"])
    world.fill_upload(update)
    call = world.ask(rq.CommitUpload(update), "ml/Job/a")
    assert world.do(rq.Claim(), "ml/Job/a").success, "a claim of the holder changes nothing"
    assert call not in world.answers
    assert world.do(rq.Claim(take_over=True), "ml/Job/b").fleet["holder"] == "ml/Job/b"
    assert (world.answers[call].status, last(world).reason) == (409, UpdateReason.TAKEN_OVER)
    restart(world)
    assert serves(world, "1/1")


def test_a_commit_whose_client_leaves_still_waits() -> None:
    world = served_world()
    call = begin_commit(world)
    world.disconnect(call)
    world.tick(400)
    world.drain()
    restart(world)
    assert serves(world, "1/2")


def test_engines_that_end_after_the_commit_do_not_fail_the_call_that_resumes() -> None:
    world = StagedWorld(1)
    assert world.open_group().success
    for request in (PAUSE, rq.Begin(), rq.Update("g", "1", TENSORS), rq.End()):
        assert world.do(request).success
    stop_all(world)
    assert world.do(rq.Continue()).success
    restart(world)
    assert serves(world, "1/1")


@pytest.mark.parametrize("request_", [PAUSE, rq.Continue(), rq.Flush()])
def test_with_another_transport_such_calls_are_refused(request_: rq.Call) -> None:
    world = World([1])
    world.sync_all()
    world.agents["e0"].up = False
    world.sync_all()
    assert world.do(request_).status == 503
