"""Calls that a fleet with transport Staged refuses, and what stays open after a refusal."""

from __future__ import annotations

import pytest

from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.wire.ports import STORE_OPEN
from sglang_rollout.wire.record import UpdateOutcome, UpdateReason
from tests.properties.support.simulated_agent import NAMES
from tests.properties.support.staged_world import TENSORS, StagedWorld, last, serves, shard_of


def test_an_upload_without_all_pieces_stays_open() -> None:
    world = StagedWorld(2)
    update = world.open_upload("1").fleet["update"]
    answer = world.do(rq.CommitUpload(update))
    assert (answer.status, "3 pieces are missing" in answer.message) == (409, True)
    world.fill_upload(update)
    assert world.do(rq.CommitUpload(update)).success


@pytest.mark.parametrize("readable", [True, False], ids=["listed", "unchecked"])
@pytest.mark.parametrize("by_group", [True, False], ids=["group", "upload"])
def test_a_push_that_lacks_known_tensors_is_refused_before_a_byte_moves(readable: bool, by_group: bool) -> None:
    """The refusal names no call that the fleet refuses, as it does update_weights_from_disk."""
    world = StagedWorld(2)
    assert world.push("1").success
    world.settle()
    for agent in world.agents.values():
        agent.readable = readable
    opened = len([send for send in world.sent if send.path == STORE_OPEN])
    answer = world.do(rq.Begin(label="2", names=frozenset(NAMES[:1]))) if by_group else world.open_upload("2", names=NAMES[:1])
    assert (answer.status, answer.fleet["reason"]) == (400, "TensorsMissing")
    assert "The version lacks 2 of 3 tensors of a complete push" in answer.message
    assert "push all of them in one update, or open a run without them (POST /fleet/run). Nothing was sent." in answer.message
    assert len([send for send in world.sent if send.path == STORE_OPEN]) == opened
    assert serves(world, "1/1")
    assert world.do(rq.NewRun()).success
    assert world.open_upload("1", names=NAMES[:1]).success, "a new run may have fewer tensors"


def test_fewer_tensors_may_begin_a_run_on_engines_that_have_all_restarted() -> None:
    world = StagedWorld(2)
    for agent in world.agents.values():
        agent.readable = False
    assert world.push("5").success
    assert not world.open_upload("1", names=NAMES[:1]).success, "an engine that holds version 5 would keep its other tensors"
    for agent in world.agents.values():
        agent.up = False
    world.settle()
    assert world.open_upload("1", names=NAMES[:1]).success, "no engine is up, and those that start hold model.path"


def test_an_upload_that_does_not_fit_is_refused_before_a_byte_moves() -> None:
    world = StagedWorld(2)
    answer = world.do(rq.Upload((shard_of(["u", "strange"]), shard_of(["v"], (3,))), "1"))
    assert answer.status == 400
    for problem in ("strange is not in the model", "v has shape [3], expected [2]"):
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
