"""Updates with transport Staged, one fault at a time: before the record nothing changes, and after it the fleet moves forward."""

from __future__ import annotations

import pytest

from sglang_rollout.api.weights_spec import Backend, Store, StoreGPU
from sglang_rollout.coordinator.update import events as ev
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.phases import Phase
from sglang_rollout.coordinator.update.store import STORE
from sglang_rollout.wire.ports import AGENT_ACTIVATE, AGENT_RUN, AGENT_STAGE, STORE_DROP, STORE_FETCH, STORE_OPEN, STORE_RECEIVE, STORE_SEAL
from sglang_rollout.wire.record import EndedUpdate, UpdateOutcome, UpdateReason
from sglang_rollout.wire.states import EngineState, FleetState
from tests.properties.support.simulated_agent import NAMES
from tests.properties.support.staged_world import TENSORS, StagedWorld, shard_of


def last(world: StagedWorld) -> EndedUpdate:
    found = world.machine.fleet.last_update
    assert found is not None
    return found


def serves(world: StagedWorld, version: str) -> bool:
    """Return whether every engine serves this version, and none is paused."""
    world.settle()
    agents = world.agents.values()
    return all(agent.gate_open and not agent.paused and str(agent.version) == version for agent in agents)


def run_to(world: StagedWorld, path: str) -> None:
    """Carry out effects until a call to this path is the next."""
    for _ in range(200):
        if world.pending and isinstance(world.pending[0], ev.Send) and world.pending[0].path == path:
            return
        world.complete()
    raise AssertionError(f"{path} was not called")


# --- what works ------------------------------------------------------------------------------------------------------


def test_a_push_through_a_process_group_is_staged_loaded_and_served() -> None:
    world = StagedWorld(3)
    assert world.machine.fleet.table.world_size == 2
    answer = world.push("1")
    assert answer.success, answer.message
    assert (answer.fleet["state"], answer.fleet["outcome"]) == ("committed", "Committed")
    assert serves(world, "1/1")
    assert last(world).phases_ms.keys() >= {"stage", "canary", "activate", "commit", "resume"}


def test_a_process_group_over_nccl_needs_a_gpu_of_the_weight_store() -> None:
    """A trainer that names no backend gets that of the spec."""
    for store, status in ((None, 400), (Store(), 400), (Store(gpu=StoreGPU()), 200)):
        world = StagedWorld(2, backend=Backend.NCCL, store=store)
        refused = world.open_group()
        assert refused.status == status, refused.message
        assert status == 200 or "Set weights.store.gpu, or open the process group with backend gloo." in refused.message
        assert world.store.groups == (["g"] if status == 200 else [])
        body = {"master_address": "10.0.0.9", "master_port": 7, "rank_offset": 1, "group_name": "h", "world_size": 2, "backend": "gloo"}
        assert world.do(rq.OpenGroup(body)).success


def test_one_engine_loads_first_and_the_record_is_written_before_the_others() -> None:
    world = StagedWorld(3)
    world.push("1")
    loads = [sorted(send.bodies) for send in world.sent if send.path == AGENT_ACTIVATE]
    assert [len(names) for names in loads] == [1, 2]
    assert world.open_group().success
    for request in (rq.Begin(), rq.Update("g", "2", TENSORS)):
        assert world.do(request).success
    world.ask(rq.End())
    run_to(world, AGENT_ACTIVATE)
    world.complete()
    assert isinstance(world.pending[0], ev.Write)
    record = world.pending[0].record
    assert (str(record.committed), record.staged is not None, str(record.under_way)) == ("1/2", True, "1/2")
    world.drain()
    assert serves(world, "1/2")


def test_an_engine_generates_as_soon_as_it_has_loaded_the_committed_version() -> None:
    world = StagedWorld(3)
    world.push("1")
    assert world.do(rq.Begin()).success
    assert world.send_tensors("2").success
    world.ask(rq.End())
    for _ in range(2):
        run_to(world, AGENT_ACTIVATE)
        assert world.machine.fleet.phase in (Phase.STAGE, Phase.CANARY, Phase.ACTIVATE)
        first, *others = world.agents.values()
        if world.machine.fleet.phase is Phase.ACTIVATE:
            assert (str(first.version), first.gate_open, first.paused) == ("1/2", True, False), "it does not wait for the others"
        world.complete()
    assert all(agent.gate_open and not agent.paused for agent in others)
    world.drain()
    assert [sorted(send.bodies) for send in world.sent if send.path == AGENT_RUN][-1] == ["e0"], "the others resume by themselves"
    assert serves(world, "1/2")


def test_an_engine_that_does_not_resume_after_the_commit_delays_no_other_engine() -> None:
    world = StagedWorld(3)
    world.push("1")
    assert world.do(rq.Begin()).success
    assert world.send_tensors("2").success
    world.ask(rq.End())
    run_to(world, AGENT_RUN)
    resume = world.pending[0]
    assert isinstance(resume, ev.Send)
    assert (list(resume.bodies), resume.deadline) == (["e0"], 3.0)
    world.complete(0, broken=frozenset({"e0"}))
    assert isinstance(world.pending[0], ev.Send)
    assert (world.pending[0].path, sorted(world.pending[0].bodies)) == (AGENT_ACTIVATE, ["e1", "e2"])
    world.drain()
    assert serves(world, "1/2")


def test_an_upload_may_differ_from_the_version_that_is_committed_when_its_turn_comes() -> None:
    world = StagedWorld(2)
    update = str(world.open_upload("1").fleet["update"])
    world.fill_upload(update)
    world.ask(rq.CommitUpload(update, wait=False))
    run_to(world, AGENT_ACTIVATE)
    digest = world.store.copies[update].digest
    call = world.ask(rq.Upload((shard_of(NAMES),), "2", base=digest))
    world.drain()
    assert world.answers[call].success, world.answers[call].message
    wrong = world.do(rq.Upload((shard_of(NAMES),), "3", base="0" * 64))
    assert (wrong.status, "Upload all pieces whole" in wrong.message) == (409, True)


def test_an_engine_whose_checksums_only_the_coordinator_can_judge_stays_paused() -> None:
    world = StagedWorld(3)
    world.push("1")
    loads = [send for send in world.sent if send.path == AGENT_ACTIVATE]
    assert [[body["sync"] is not None for body in send.bodies.values()] for send in loads] == [[False], [True, True]]


def test_an_upload_is_staged_loaded_and_served_and_its_commit_can_be_repeated() -> None:
    world = StagedWorld(2)
    opened = world.open_upload("1")
    assert opened.success, opened.message
    update = opened.fleet["update"]
    world.fill_upload(update)
    for _ in range(2):
        answer = world.do(rq.CommitUpload(update))
        assert answer.success, answer.message
        assert (answer.fleet["state"], answer.fleet["update"]) == ("committed", update)
    assert serves(world, "1/1")
    assert last(world).update == update


def test_a_trainer_without_session_commits_with_the_call_that_resumes() -> None:
    world = StagedWorld(2)
    assert world.open_group().success
    assert world.do(rq.Pause("retract", {"mode": "retract"})).success
    assert world.send_tensors("1").success
    assert all(agent.paused for agent in world.agents.values()), "the trainer's pause is honoured"
    resumed = world.do(rq.Continue())
    assert (resumed.success, resumed.fleet["state"]) == (True, "committed")
    assert serves(world, "1/1")


@pytest.mark.parametrize("request_", [rq.Flush(), rq.CloseGroup("g")])
def test_a_trainer_that_does_not_pause_commits_by_flush_or_by_closing_the_group(request_: rq.Call) -> None:
    world = StagedWorld(2)
    assert world.open_group().success
    assert world.send_tensors("1").success
    assert world.do(request_).success
    assert serves(world, "1/1")


def test_engines_stay_paused_until_the_trainer_continues() -> None:
    world = StagedWorld(2)
    world.push("1")
    assert world.do(rq.Pause("abort", {"mode": "abort"})).success
    assert world.push("2").success
    assert all(agent.paused for agent in world.agents.values())
    assert world.do(rq.Continue()).success
    assert serves(world, "1/2")


def test_engines_copy_while_tensors_still_arrive() -> None:
    world = StagedWorld(3)
    assert world.open_group().success
    assert world.do(rq.Begin()).success
    early = [send for send in world.sent if send.path == AGENT_STAGE]
    assert len(early) == 1
    assert {body["digest"] for body in early[0].bodies.values()} == {""}
    assert {tuple(body["parents"]) for body in early[0].bodies.values()} == {(STORE,), ("e0", STORE)}


def test_pods_have_time_to_copy_a_version_once_more_after_its_tensors_arrived_slowly() -> None:
    """An agent that is restarted copies the version from its beginning."""
    world = StagedWorld(2)
    update = str(world.open_upload("1").fleet["update"])
    world.tick(100)
    world.fill_upload(update)
    assert world.do(rq.CommitUpload(update)).success
    early, complete = [send for send in world.sent if send.path == AGENT_STAGE][:2]
    limits = world.policy.deadlines
    assert {body["deadline"] for body in early.bodies.values()} == {limits.total_seconds + limits.stage_seconds}
    assert complete.patience is not None
    assert complete.patience >= 100


def test_a_paused_fleet_takes_weights_and_stays_paused() -> None:
    world = StagedWorld(2)
    world.set_state(FleetState.PAUSED)
    world.settle()
    assert world.push("1").success
    world.settle()
    assert all(agent.paused and not agent.gate_open and str(agent.version) == "1/1" for agent in world.agents.values())
    world.set_state(FleetState.ACTIVE)
    assert serves(world, "1/1")


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
    assert (last(world).reason, "2 of 3 tensors of a complete push" in answer.message) == (UpdateReason.INCOMPLETE, True)
    assert serves(world, "1/1")


def test_a_tensor_that_no_engine_has_seen_is_not_demanded_afterwards() -> None:
    world = StagedWorld(2)
    world.push("1")
    world.do(rq.Begin())
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


# --- waiting ---------------------------------------------------------------------------------------------------------


def test_a_call_that_commits_is_answered_after_25_seconds_and_the_operation_continues() -> None:
    world = StagedWorld(2)
    assert world.open_group().success
    world.do(rq.Begin())
    assert world.send_tensors("1").success
    call = world.ask(rq.End())
    run_to(world, AGENT_STAGE)
    world.tick(24)
    assert call not in world.answers
    world.tick(2)
    assert (world.answers[call].success, world.answers[call].fleet["state"]) == (True, "staged")
    waiting = world.ask(rq.Continue())
    world.tick(26)
    assert world.answers[waiting].fleet["state"] == "staged"
    world.drain()
    assert serves(world, "1/1")


def test_an_upload_may_be_answered_when_it_is_staged() -> None:
    world = StagedWorld(2)
    update = world.open_upload("1").fleet["update"]
    world.fill_upload(update)
    call = world.ask(rq.CommitUpload(update, wait=False))
    run_to(world, AGENT_STAGE)
    assert world.answers[call].fleet["state"] == "staged"
    world.drain()
    assert world.do(rq.CommitUpload(update)).fleet["state"] == "committed"


def test_pieces_that_arrive_keep_a_silent_upload_alive() -> None:
    world = StagedWorld(2)
    update = world.open_upload("1").fleet["update"]
    for number, name in enumerate(NAMES):
        world.store.upload(update, {name: number})
        world.poll_store()
        world.tick(100)
    assert world.machine.fleet.update is not None
    world.tick(200)
    world.drain()
    assert last(world).reason is UpdateReason.TRAINER_LOST


# --- refusals --------------------------------------------------------------------------------------------------------


def test_an_upload_without_all_pieces_stays_open() -> None:
    world = StagedWorld(2)
    update = world.open_upload("1").fleet["update"]
    answer = world.do(rq.CommitUpload(update))
    assert (answer.status, "3 pieces are missing" in answer.message) == (409, True)
    world.fill_upload(update)
    assert world.do(rq.CommitUpload(update)).success


def test_the_refusal_of_an_upload_that_lacks_known_tensors_names_no_call_that_the_fleet_refuses() -> None:
    """The fleet refuses update_weights_from_disk."""
    world = StagedWorld(2)
    assert world.push("1").success
    world.settle()
    for agent in world.agents.values():
        agent.readable = False
    some = NAMES[:1]
    update = world.open_upload("2", names=some).fleet["update"]
    world.fill_upload(update, names=some)
    answer = world.do(rq.CommitUpload(update))
    assert not answer.success
    assert "tensors of a complete push" in answer.message
    assert "push all of them in one update (phase stage)" in answer.message


def test_an_upload_that_does_not_fit_is_refused_before_a_byte_moves() -> None:
    world = StagedWorld(2)
    answer = world.do(rq.Upload((shard_of(["u", "strange"]), shard_of(["v"], (3,))), "1"))
    assert answer.status == 400
    for problem in ("strange is not in the model", "v has shape [3], expected [2]", "w is missing"):
        assert problem in answer.message
    large = world.do(rq.Upload((shard_of(NAMES, (2**30,)),), "1"))
    assert (large.status, str(3 * 2**31) in large.message, str(2**30) in large.message) == (413, True, True)
    assert not [send for send in world.sent if send.path == STORE_OPEN]


def test_an_upload_is_withdrawn_once_and_unknown_ones_are_refused() -> None:
    world = StagedWorld(2)
    update = world.open_upload("1").fleet["update"]
    assert world.do(rq.WithdrawUpload(update)).success
    assert (last(world).outcome, last(world).reason) == (UpdateOutcome.ABORTED, UpdateReason.WITHDRAWN)
    assert world.do(rq.WithdrawUpload(update)).success
    assert world.do(rq.CommitUpload(update)).status == 409
    assert world.do(rq.CommitUpload("0" * 32)).status == 404


@pytest.mark.parametrize("request_", [rq.End(), rq.CloseGroup("g"), rq.Update("g", None, TENSORS)])
def test_only_its_own_call_commits_an_upload(request_: rq.Call) -> None:
    world = StagedWorld(2)
    assert world.open_group().success
    update = world.open_upload("1").fleet["update"]
    assert world.do(request_).success == isinstance(request_, rq.CloseGroup)
    assert world.machine.fleet.update is not None
    for other in (rq.Pause("retract", {"mode": "retract"}), rq.Continue(), rq.Flush()):
        assert world.do(other).success
    world.fill_upload(update)
    assert world.do(rq.CommitUpload(update)).success


def test_checkpoints_and_other_world_sizes_are_refused() -> None:
    world = StagedWorld(2)
    assert "POST /fleet/updates" in world.do(rq.FromDisk("/c", None, {})).message
    body = {"master_address": "10.0.0.9", "master_port": 7, "rank_offset": 1, "group_name": "g", "world_size": 3}
    assert "Use rank_offset=1 and world_size=2" in world.do(rq.OpenGroup(body)).message


def test_released_memory_is_restored_first() -> None:
    world = StagedWorld(2)
    assert world.do(rq.ReleaseMemory(())).success
    world.settle()
    assert world.open_group().success
    world.do(rq.Begin())
    assert world.send_tensors("1").success
    assert world.do(rq.End()).status == 409
    assert world.do(rq.ResumeMemory()).success
    world.settle()
    assert world.do(rq.End()).success
    assert serves(world, "1/1")


def test_a_second_trainer_is_refused_while_the_first_uploads_and_takes_over_afterwards() -> None:
    world = StagedWorld(2)
    update = world.open_upload("1", caller="ml/Job/a").fleet["update"]
    assert world.open_upload("1", caller="ml/Job/b").status == 409
    assert world.do(rq.CommitUpload(update), "ml/Job/b").status == 409
    world.tick(25)
    other = world.open_upload("1", caller="ml/Job/b")
    assert other.success, other.message
    assert last(world).reason is UpdateReason.TAKEN_OVER
    world.fill_upload(other.fleet["update"])
    assert world.do(rq.CommitUpload(other.fleet["update"]), "ml/Job/b").success
    assert last(world).author == "ml/Job/b"
    assert serves(world, "1/1")


def test_engines_resume_only_after_the_record() -> None:
    world = StagedWorld(2)
    assert world.open_group().success
    assert world.do(rq.Begin()).success
    assert world.send_tensors("1").success
    world.ask(rq.End())
    run_to(world, AGENT_ACTIVATE)
    world.complete()
    assert isinstance(world.pending[0], ev.Write)
    assert AGENT_RUN not in [send.path for send in world.sent]
    first = world.agents["e0"]
    assert (str(first.version), first.gate_open, first.paused) == ("1/1", False, True)
    world.drain()
    assert serves(world, "1/1")
