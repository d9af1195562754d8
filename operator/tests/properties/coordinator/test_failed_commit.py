"""A trainer that repeats the call of a failed commit gets the failure again, until it begins again."""

from __future__ import annotations

import pytest

from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.wire.record import UpdateReason
from sglang_rollout.wire.states import Version
from tests.properties.coordinator.test_partial_commit import COMMITS, ready, until_answered
from tests.properties.support.coordinator_world import World, group_body
from tests.properties.support.staged_world import StagedWorld

BASE = Version(run=0, step=0, label="base")
PAUSE = rq.Pause("abort", {"mode": "abort"})


def failed(commit: str) -> tuple[World, rq.Answer]:
    """Two of three engines fail at the end of an update."""
    world = ready(commit)
    answer = until_answered(world, world.ask(COMMITS[commit]), "e1", "e2")
    world.drain()
    assert not answer.success
    return world, answer


def heard(answer: rq.Answer) -> tuple[object, ...]:
    return answer.status, answer.code, answer.message, answer.fleet["cause"], answer.fleet.get("reason")


@pytest.mark.parametrize("commit", COMMITS)
def test_a_repeated_commit_repeats_its_failure(commit: str) -> None:
    world, answer = failed(commit)
    for _ in range(3):
        assert heard(world.do(COMMITS[commit])) == heard(answer)
        world.settle()
    assert world.machine.fleet.committed == BASE


@pytest.mark.parametrize("commit", COMMITS)
def test_a_label_after_the_failure_is_refused_with_it(commit: str) -> None:
    world, answer = failed(commit)
    assert heard(world.do(rq.SetLabel("7"))) == heard(answer)
    assert world.do(rq.SetLabel("base")).status != 400, "the committed label is not that of the failed update"


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("pauses", [False, True])
def test_the_next_update_commits(commit: str, pauses: bool) -> None:
    world, _ = failed(commit)
    world.settle()
    begin: list[rq.Request] = [PAUSE] if pauses else []
    for request in (rq.OpenGroup(group_body(world, "g")), *begin, rq.Update("g", "9", {"names": ["w"]}), rq.Continue()):
        assert world.do(request).success
    assert world.machine.fleet.committed == Version(run=1, step=9, label="9")
    assert world.do(rq.Continue()).success, "there is no failure any more"


@pytest.mark.parametrize("commit", ["continue", "flush"])
def test_a_pause_ends_the_repetition(commit: str) -> None:
    world, _ = failed(commit)
    world.settle()
    assert world.do(PAUSE).success
    assert world.do(rq.Continue()).success


def test_calls_of_other_kinds_do_not_repeat_the_failure() -> None:
    """Some trainers flush at their start until that succeeds, and continue after a session that has failed."""
    world, _ = failed("end")
    world.settle()
    for request in (rq.Flush(), rq.Continue()):
        assert world.do(request).success
    world, _ = failed("continue")
    world.settle()
    assert world.do(rq.Flush()).success


@pytest.mark.parametrize("commit", COMMITS)
def test_an_update_that_was_given_up_before_its_commit_is_no_success(commit: str) -> None:
    """The trainer is silent for too long, and does not know that its update was given up."""
    world = ready(commit)
    world.tick(world.policy.deadlines.total_seconds + 1)
    world.settle()
    assert world.machine.fleet.update is None
    first, second = world.do(COMMITS[commit]), world.do(COMMITS[commit])
    assert not first.success
    assert "weights.deadlines.totalSeconds" in first.message
    assert heard(first) == heard(second)


def test_another_trainer_does_not_get_the_failure() -> None:
    world = ready("continue")
    world.machine.fleet.require_update().author = "default/anne"
    until_answered(world, world.ask(COMMITS["continue"]), "e1", "e2")
    world.settle()
    assert world.do(rq.Continue(), "default/ben").success
    assert not world.do(rq.Continue(), "default/anne").success


@pytest.mark.parametrize("commit", COMMITS)
def test_the_next_coordinator_repeats_the_failure(commit: str) -> None:
    world, answer = failed(commit)
    world.tick(1)
    world.start()
    world.settle()
    assert heard(world.do(COMMITS[commit])) == heard(answer)


@pytest.mark.parametrize("commit", COMMITS)
def test_a_commit_is_no_success_after_the_coordinator_was_restarted_in_the_update(commit: str) -> None:
    """A trainer that lost its connection repeats the call, and the new coordinator knows of no open update."""
    world = ready(commit)
    world.ask(COMMITS[commit])
    world.start()
    world.settle()
    first, second = world.do(COMMITS[commit]), world.do(COMMITS[commit])
    assert not first.success
    assert "the coordinator was restarted in the middle of the update" in first.message
    assert first.fleet["reason"] == UpdateReason.COORDINATOR_RESTARTED, "the client then repeats its push"
    assert heard(first) == heard(second)
    assert world.machine.fleet.committed == BASE


def test_an_ended_upload_repeats_its_failure_to_its_own_commit_only() -> None:
    world = StagedWorld()
    world.settle()
    update = str(world.open_upload("1").fleet["update"])
    world.fill_upload(update)
    world.store.answers = False
    first = world.do(rq.CommitUpload(update))
    world.store.answers = True
    world.settle()
    assert not first.success
    assert heard(world.do(rq.CommitUpload(update))) == heard(first)
    assert world.do(rq.CommitUpload("0" * 32)).status != first.status
