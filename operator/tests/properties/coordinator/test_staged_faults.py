"""Updates with transport Staged, one fault at a time: before the record nothing changes, and after it the fleet moves forward."""

from __future__ import annotations

import pytest

from sglang_rollout.api.weights_spec import Deadlines
from sglang_rollout.coordinator.update import events as ev
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.phases import Phase
from sglang_rollout.coordinator.update.store import STORE
from sglang_rollout.wire.ports import AGENT_ACTIVATE, AGENT_STAGE, STORE_DROP, STORE_FETCH, STORE_OPEN, STORE_RECEIVE, STORE_SEAL
from sglang_rollout.wire.record import UpdateOutcome, UpdateReason
from sglang_rollout.wire.states import EngineState
from tests.properties.support.simulated_agent import NAMES
from tests.properties.support.staged_world import TENSORS, StagedWorld, last, run_to, serves

# --- faults before the record ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [STORE_RECEIVE, STORE_SEAL])
def test_a_store_that_fails_ends_the_update_and_nothing_changes(path: str) -> None:
    world = StagedWorld(2)
    world.push("1")
    world.do(rq.Begin())
    for request in (rq.Update("g", "2", TENSORS), rq.End()):
        world.ask(request)
        world.drain(failing=path, engines=[STORE])
    assert last(world).reason is UpdateReason.STORE_FAILED
    acks = [body["ack"]["version"]["step"] for send in world.sent if send.path == AGENT_ACTIVATE for body in send.bodies.values()]
    assert acks == [1, 1], "no engine was asked to load version 2"
    assert serves(world, "1/1")
    assert world.push("2").success
    assert serves(world, "1/2")


def test_a_store_that_does_not_open_refuses_the_first_call() -> None:
    world = StagedWorld(2)
    assert world.open_group().success
    call = world.ask(rq.Begin())
    world.drain(failing=STORE_OPEN, engines=[STORE])
    assert world.answers[call].status == 503
    assert world.machine.fleet.phase is Phase.IDLE
    assert world.push("1").success


def test_a_store_that_restarts_loses_the_open_update_and_gets_the_committed_version_back() -> None:
    world = StagedWorld(2)
    world.push("1")
    assert world.do(rq.Begin()).success
    world.store.restart()
    world.settle()
    assert (last(world).reason, last(world).outcome) == (UpdateReason.STORE_LOST, UpdateOutcome.FAILED)
    staged = world.machine.fleet.weights.staged
    assert staged is not None
    assert world.store.copies[staged.update].digest == staged.digest
    assert [send.bodies[STORE]["parents"] for send in world.sent if send.path == STORE_FETCH] == [["e0", "e1"]]
    assert serves(world, "1/1")
    answer = world.do(rq.Begin())
    assert "process group" in answer.message, "a trainer with a fixed process group must open it again"
    assert world.push("2").success


def test_a_copy_that_fails_leaves_every_engine_at_the_version_before() -> None:
    world = StagedWorld(3)
    world.push("1")
    world.do(rq.Begin())
    assert world.send_tensors("2").success
    call = world.ask(rq.End())
    world.drain(failing=AGENT_STAGE, engines=["e1"])
    assert "engine e1 did not copy the version" in world.answers[call].message
    assert world.answers[call].fleet["reason"] == UpdateReason.ENGINE_FAILED
    assert "no engine has changed" in world.answers[call].message
    assert serves(world, "1/1")
    assert [send for send in world.sent if send.path == STORE_DROP]


def test_with_min_committed_an_engine_without_a_copy_is_left_behind_and_follows() -> None:
    world = StagedWorld(3, min_committed=2)
    world.do(rq.NewRun())
    assert world.open_group().success
    world.do(rq.Begin())
    assert world.send_tensors("1").success
    call = world.ask(rq.End())
    run_to(world, AGENT_STAGE)
    world.complete(0, broken=frozenset({"e1"}))
    world.drain()
    answer = world.answers[call]
    assert answer.success, answer.message
    assert (answer.fleet["outcome"], list(answer.fleet["fenced"])) == ("Partial", ["e1"])
    assert serves(world, "1/1")


def test_if_every_engine_refuses_the_version_the_update_fails_and_the_version_before_is_served() -> None:
    world = StagedWorld(3, min_committed=1)
    world.push("1")
    assert serves(world, "1/1")
    world.do(rq.Begin())
    assert world.send_tensors("2").success
    call = world.ask(rq.End())
    world.drain(failing=AGENT_ACTIVATE, engines=world.agents)
    assert not world.answers[call].success
    assert last(world).outcome is UpdateOutcome.FAILED
    assert all(agent.gate_open and agent.state is EngineState.CLEAN for agent in world.agents.values()), "no gate closed for a moment"
    assert serves(world, "1/1")


def test_a_version_that_breaks_engines_breaks_two_at_most() -> None:
    world = StagedWorld(4, min_committed=1)
    world.push("1")
    for agent in world.agents.values():
        agent.breaks = True
    world.do(rq.Begin())
    assert world.send_tensors("2").success
    world.ask(rq.End())
    world.drain(failing=AGENT_ACTIVATE, engines=world.agents)
    assert sum(agent.state is EngineState.DIRTY for agent in world.agents.values()) == 2
    assert last(world).outcome is UpdateOutcome.FAILED
    world.tick(30)
    assert serves(world, "1/1"), "the two load their copies of the version before"


def test_a_refused_canary_is_left_behind_if_the_policy_allows() -> None:
    world = StagedWorld(3, min_committed=2)
    world.push("1")
    world.do(rq.Begin())
    assert world.send_tensors("2").success
    call = world.ask(rq.End())
    run_to(world, AGENT_ACTIVATE)
    world.complete(0, broken=frozenset({"e0"}))
    world.drain()
    assert world.answers[call].success
    assert serves(world, "1/2")


def test_checksums_of_the_trainer_that_do_not_fit_stop_at_the_canary() -> None:
    world = StagedWorld(3)
    world.push("1")
    world.do(rq.Begin())
    assert world.send_tensors("2").success
    answer = world.do(rq.End({1: ("other",)}))
    assert not answer.success
    assert last(world).outcome is UpdateOutcome.FAILED
    loads = [list(send.bodies) for send in world.sent if send.path == AGENT_ACTIVATE][2:]
    assert loads == [["e0"], ["e0"]], "one engine loaded version 2, and then version 1 again"
    assert serves(world, "1/1")


def test_an_incomplete_push_is_refused() -> None:
    world = StagedWorld(2)
    world.push("1")
    world.do(rq.Begin())
    part = {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[2]]}
    assert world.do(rq.Update("g", "2", part)).success
    answer = world.do(rq.End())
    assert (last(world).reason, "2 of 3 tensors of a complete push" in answer.message) == (UpdateReason.TENSORS_MISSING, True)
    assert "Push again" not in answer.message, "a push of the same tensors fails again"
    assert serves(world, "1/1")


def test_a_tensor_that_no_engine_has_seen_is_not_demanded_afterwards() -> None:
    world = StagedWorld(2)
    world.push("1")
    world.do(rq.Begin())
    for agent in world.agents.values():
        agent.readable = False
    world.machine.fleet.membership.model = None
    strange = {"names": [*NAMES, "strange"], "dtypes": ["bfloat16"] * 4, "shapes": [[2]] * 4}
    assert world.do(rq.Update("g", "2", strange)).success
    world.ask(rq.End())
    world.drain(failing=AGENT_ACTIVATE, engines=world.agents)
    assert last(world).outcome is UpdateOutcome.FAILED
    assert world.push("3").success


# --- faults after the record -----------------------------------------------------------------------------------------


def test_after_the_record_an_engine_that_fails_follows_without_a_push() -> None:
    world = StagedWorld(3)
    world.push("1")
    world.agents["e2"].breaks = True
    world.do(rq.Begin())
    assert world.send_tensors("2").success
    call = world.ask(rq.End())
    run_to(world, AGENT_ACTIVATE)
    world.complete()
    world.drain(failing=AGENT_ACTIVATE, engines=["e2"])
    answer = world.answers[call]
    assert (answer.success, answer.fleet["reason"], answer.fleet["state"]) == (False, "TooFewEngines", "committed")
    assert "The fleet moves forward" in answer.message
    repeated = world.do(rq.CommitUpload(str(answer.fleet["update"])))
    assert (repeated.status, repeated.fleet["reason"], repeated.fleet["state"]) == (500, "TooFewEngines", "committed")
    assert (last(world).outcome, last(world).reason) == (UpdateOutcome.PARTIAL, UpdateReason.TOO_FEW_ENGINES)
    world.tick(30)
    assert serves(world, "1/2")


@pytest.mark.parametrize("steps", range(12))
def test_a_coordinator_that_restarts_at_any_step_leaves_one_version_everywhere(steps: int) -> None:
    world = StagedWorld(3)
    world.push("1")
    world.do(rq.Begin())
    assert world.send_tensors("2").success
    world.ask(rq.End())
    for _ in range(steps):
        if world.pending:
            world.complete()
    world.start()
    world.settle()
    world.tick(30)
    committed = str(world.machine.fleet.committed)
    assert serves(world, committed)
    assert last(world).outcome in (UpdateOutcome.COMMITTED, UpdateOutcome.PARTIAL) or committed == "1/1"
    assert world.push("3").success
    assert serves(world, "1/3")


def test_a_new_coordinator_closes_outdated_gates_before_it_answers_that_a_version_is_committed() -> None:
    """Its predecessor ended between the record of the activation and the calls that pause the other engines."""
    world = StagedWorld(3)
    world.push("1")
    update = str(world.open_upload("2").fleet["update"])
    world.fill_upload(update)
    world.ask(rq.CommitUpload(update))
    while world.record is None or str(world.record.committed) != "1/2":
        world.complete()
    world.start()
    world.sync_all()
    assert len(world.serving) == 2, "two engines still serve the version before"
    call = world.ask(rq.CommitUpload(update))
    while call not in world.answers:
        world.complete()
    assert world.answers[call].fleet["state"] == "committed"
    assert {str(agent.version) for agent in world.agents.values() if agent.gate_open} <= {"1/2"}
    assert serves(world, "1/2")


def test_an_engine_that_restarts_loads_its_own_copy_or_that_of_a_peer() -> None:
    world = StagedWorld(3)
    world.push("1")
    world.store.answers = False
    world.agents["e1"].restart()
    world.agents["e2"].restart()
    world.agents["e2"].copies = {}
    assert serves(world, "1/1")


def test_all_engines_and_the_coordinator_restart_and_serve_the_version_again() -> None:
    world = StagedWorld(3)
    world.push("1")
    for agent in world.agents.values():
        agent.restart()
    world.start()
    assert serves(world, "1/1")


def test_an_engine_joins_while_an_update_is_open() -> None:
    world = StagedWorld(2)
    world.push("1")
    opened = world.open_upload("2")
    world.add_agent("e2")
    world.engines = [*world.engines, world.engines[0].model_copy(update={"name": "e2"})]
    world.generation += 1
    world.send_intent()
    assert serves(world, "1/1"), "it loads the committed version, and the upload stays open"
    world.fill_upload(opened.fleet["update"])
    assert world.do(rq.CommitUpload(opened.fleet["update"])).success
    assert serves(world, "1/2")


def test_a_commit_waits_for_as_many_engines_as_the_policy_asks_for() -> None:
    world = StagedWorld(3, min_committed=2)
    update = world.open_upload("1").fleet["update"]
    world.fill_upload(update)
    for name in ("e1", "e2"):
        world.agents[name].draining = True
    world.settle()
    call = world.ask(rq.CommitUpload(update))
    world.tick(26)
    answer = world.answers[call]
    assert (answer.status, "1 of 3 engines" in answer.message, "stays open" in answer.message) == (503, True, True)
    world.agents["e1"].restart()
    world.settle()
    assert world.do(rq.CommitUpload(update)).success


# --- restarts of the coordinator -------------------------------------------------------------------------------------


def upload(world: StagedWorld, label: str) -> str:
    """Upload a version, and return the ID of its update, which is not committed yet."""
    update = str(world.open_upload(label).fleet["update"])
    world.fill_upload(update)
    return update


def test_a_commit_that_engines_prove_to_a_new_coordinator_is_answered() -> None:
    """The record names neither the commit nor its update: the store of the records was away, or the coordinator ended before it wrote."""
    world = StagedWorld(3)
    assert world.do(rq.CommitUpload(upload(world, "1"))).success
    update = upload(world, "2")
    world.store_fails = True
    assert world.do(rq.CommitUpload(update)).success
    world.start()
    world.settle()
    answer = world.do(rq.CommitUpload(update))
    assert (answer.success, answer.fleet.get("state")) == (True, "committed"), answer.message


def test_a_new_coordinator_says_why_an_upload_has_ended() -> None:
    world = StagedWorld(2)
    update = upload(world, "1")
    world.ask(rq.CommitUpload(update))
    run_to(world, STORE_SEAL)
    world.start()
    world.settle()
    answer = world.do(rq.CommitUpload(update))
    assert (answer.status, "the coordinator was restarted" in answer.message) == (409, True), answer.message


def test_a_version_that_was_reported_as_failed_is_not_committed_later() -> None:
    """The only engine ends its load after a new coordinator has answered the trainer that the update was given up."""
    world = StagedWorld(1)
    assert world.do(rq.CommitUpload(upload(world, "1"))).success
    update = upload(world, "2")
    world.ask(rq.CommitUpload(update))
    run_to(world, AGENT_ACTIVATE)
    load = world.pending[0]
    assert isinstance(load, ev.Send)
    world.start()
    world.tick(0.5)
    world.sync_all()
    assert world.do(rq.CommitUpload(update)).status == 409
    world.agents["e0"].call(AGENT_ACTIVATE, dict(load.bodies["e0"]), None, True)
    assert serves(world, "1/1")
    assert str(world.machine.fleet.committed) == "1/1"


# --- parts that hang -------------------------------------------------------------------------------------------------


def test_an_engine_that_hangs_does_not_lengthen_the_next_load() -> None:
    world = StagedWorld(7, min_committed=1, in_turn=2)
    assert world.push("1").success
    assert serves(world, "1/1")
    world.sent.clear()
    world.ask(rq.CommitUpload(upload(world, "2")))
    run_to(world, AGENT_ACTIVATE)
    world.complete()
    run_to(world, AGENT_ACTIVATE)
    group = world.pending[0]
    assert isinstance(group, ev.Send)
    world.now += 65
    world.complete(lost=frozenset({list(group.bodies)[1]}))
    run_to(world, AGENT_ACTIVATE)
    following = world.pending[0]
    assert isinstance(following, ev.Send)
    assert following.deadline == group.deadline


def test_a_new_weight_store_is_filled_although_the_call_to_the_lost_one_still_waits() -> None:
    """The node of the weight store was lost while it copied the committed version, so nothing ends the connection."""
    world = StagedWorld(2)
    assert world.do(rq.CommitUpload(upload(world, "1"))).success
    world.settle()
    world.store.restart()
    world.tick(0.5)
    world.sync_all()
    lost = [effect for effect in world.pending if isinstance(effect, ev.Send) and effect.path == STORE_FETCH]
    assert len(lost) == 1
    world.pending = [effect for effect in world.pending if effect not in lost]
    world.store.restart()
    world.settle()
    staged = world.machine.fleet.weights.staged
    assert staged is not None
    assert world.store.copies[staged.update].digest == staged.digest


def test_the_ticket_of_an_upload_is_valid_for_as_long_as_the_answer_says() -> None:
    world = StagedWorld(1, deadlines=Deadlines(total_seconds=7200))
    answer = world.open_upload("1")
    opened = next(send for send in world.sent if send.path == STORE_OPEN)
    assert opened.bodies[STORE]["upload_seconds"] == answer.fleet["expires_seconds"] == 7200
