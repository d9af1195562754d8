"""What the pods have of an update that ended without a commit, with transport Staged: they delete it at once."""

from __future__ import annotations

from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.wire.ports import AGENT_DROP, AGENT_STAGE
from tests.properties.support.staged_world import StagedWorld, run_to


def test_pods_delete_what_they_have_of_a_withdrawn_upload_and_the_answer_does_not_wait_for_that() -> None:
    world = StagedWorld(2)
    update = str(world.open_upload("1").fleet["update"])
    assert all(agent.begun == {update} for agent in world.agents.values())
    call = world.ask(rq.WithdrawUpload(update))
    assert world.answers[call].success
    world.drain()
    assert not any(agent.begun for agent in world.agents.values())


def test_pods_delete_their_copies_of_a_version_that_failed_and_keep_the_committed_one() -> None:
    world = StagedWorld(3)
    world.push("1")
    world.do(rq.Begin())
    assert world.send_tensors("2").success
    call = world.ask(rq.End())
    run_to(world, AGENT_STAGE)
    world.complete(broken=frozenset({"e1"}))
    while call not in world.answers:
        world.complete()
    assert not world.answers[call].success
    assert [len(agent.copies) for agent in world.agents.values()] == [2, 1, 2]
    world.drain()
    committed = world.machine.fleet.weights.staged
    assert committed is not None
    assert all(list(agent.copies) == [committed.update] and not agent.begun for agent in world.agents.values())
    drops = [send for send in world.sent if send.path == AGENT_DROP]
    assert len(drops) == 1
    assert drops[0].patience is not None, "a pod that hangs does not keep the next call waiting"
