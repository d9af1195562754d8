"""Pushes that begin while engines still load the version before, with transport Staged: one waits, and further ones are refused."""

from __future__ import annotations

import pytest

from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.requests import Answer
from sglang_rollout.wire.ports import AGENT_ACTIVATE, AGENT_STAGE
from sglang_rollout.wire.reasons import RefusalCode
from tests.properties.support.simulated_agent import NAMES
from tests.properties.support.staged_world import TENSORS, StagedWorld, run_to, serves, shard_of

A, B, C = "ml/Job/a", "ml/Job/b", "ml/Job/c"
UPLOAD = rq.Upload((shard_of(NAMES),), "2")
PAUSE = rq.Pause("retract", {"mode": "retract"})
UPDATE = rq.Update("g", "2", TENSORS)


def activating_world(path: str = AGENT_ACTIVATE, *, has_group: bool = True) -> StagedWorld:
    """Return a fleet with a version of trainer A that is staged, and whose next call goes to ``path``."""
    world = StagedWorld(2)
    assert not has_group or world.open_group("g", A).success
    update = str(world.open_upload("1", caller=A).fleet["update"])
    world.fill_upload(update)
    world.ask(rq.CommitUpload(update, wait=False), A)
    run_to(world, path)
    return world


def ask_beside(world: StagedWorld, request: rq.Call, caller: str = A) -> int:
    """Make a request, and carry out what it needs before its turn. The call that runs stays as it is."""
    running = world.pending.pop(0)
    call = world.ask(request, caller)
    world.drain()
    world.pending.append(running)
    return call


def refusal(world: StagedWorld, call: int) -> Answer:
    answer = world.answers[call]
    assert (answer.status, answer.code) == (409, RefusalCode.CONFLICT), answer.message
    assert "version 1/1" in answer.message
    assert "another push waits" in answer.message
    assert answer.fleet["state"] == "staged"
    return answer


@pytest.mark.parametrize("path", [AGENT_STAGE, AGENT_ACTIVATE])
@pytest.mark.parametrize("first", [UPLOAD, PAUSE, UPDATE, rq.Begin()])
def test_one_push_waits_and_the_next_one_is_refused_at_once(path: str, first: rq.Call) -> None:
    world = activating_world(path)
    waiting = ask_beside(world, first)
    second = ask_beside(world, rq.Begin())
    assert waiting not in world.answers
    refusal(world, second)
    world.drain()
    assert world.answers[waiting].success, world.answers[waiting].message
    assert str(world.machine.fleet.committed) == "1/1", "the activation was not disturbed"


def test_the_push_that_waited_is_committed() -> None:
    world = activating_world()
    waiting = ask_beside(world, UPLOAD)
    world.drain()
    update = str(world.answers[waiting].fleet["update"])
    world.fill_upload(update)
    assert world.do(rq.CommitUpload(update), A).success
    assert serves(world, "1/2")


def test_a_client_that_leaves_makes_room_for_the_next_one() -> None:
    world = activating_world()
    world.disconnect(ask_beside(world, UPLOAD))
    waiting = ask_beside(world, UPLOAD)
    world.drain()
    assert world.answers[waiting].success


def test_ranks_of_one_trainer_that_send_tensors_wait_together() -> None:
    world = activating_world()
    calls = [ask_beside(world, UPDATE) for _ in range(2)]
    refusal(world, ask_beside(world, PAUSE))
    world.drain()
    assert [world.answers[call].success for call in calls] == [True, True]


def test_another_trainer_waits_only_when_the_lease_has_expired() -> None:
    world = activating_world(has_group=False)
    early = ask_beside(world, UPLOAD, B)
    assert (world.answers[early].status, world.answers[early].fleet["holder"]) == (409, A)
    world.tick(21)
    waiting, further = ask_beside(world, UPLOAD, B), ask_beside(world, UPLOAD, C)
    assert waiting not in world.answers
    refusal(world, further)
    world.drain()
    assert world.answers[waiting].success
    assert world.machine.fleet.holder == B


def test_a_push_waits_for_a_commit_that_waits_for_engines() -> None:
    world = StagedWorld(1)
    assert world.open_group("g", A).success
    world.agents["e0"].up = False
    world.sync_all()
    for request in (PAUSE, UPDATE):
        assert world.do(request, A).success
    world.ask(rq.Continue(), A)
    world.drain()
    waiting, further = world.ask(PAUSE, A), world.ask(rq.Begin(), A)
    assert waiting not in world.answers
    assert (world.answers[further].status, world.answers[further].code) == (409, RefusalCode.CONFLICT)
    world.agents["e0"].restart()
    world.sync_all()
    world.drain()
    assert world.answers[waiting].success


def test_before_the_version_is_complete_a_trainer_may_begin_again() -> None:
    world = StagedWorld(2)
    for _ in range(2):
        assert world.open_upload("1", caller=A).success
