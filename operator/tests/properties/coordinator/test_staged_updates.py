"""Updates with transport Staged: what works, and when calls are answered."""

from __future__ import annotations

import pytest

from sglang_rollout.api.weights_spec import Backend, Store, StoreGPU
from sglang_rollout.coordinator.update import events as ev
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.phases import Phase
from sglang_rollout.coordinator.update.store import STORE
from sglang_rollout.wire.ports import AGENT_ACTIVATE, AGENT_RUN, AGENT_STAGE
from sglang_rollout.wire.record import UpdateReason
from sglang_rollout.wire.states import FleetState
from tests.properties.support.simulated_agent import NAMES
from tests.properties.support.staged_world import TENSORS, StagedWorld, last, run_to, serves, shard_of


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
