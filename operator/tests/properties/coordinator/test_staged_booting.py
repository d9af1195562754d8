"""Engines that still boot, with transport Staged: their pods copy the committed version meanwhile, and nothing waits for that."""

from __future__ import annotations

import pytest

from sglang_rollout.coordinator.update import events as ev
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.membership import absent_sentence
from sglang_rollout.coordinator.update.store import STORE
from sglang_rollout.wire.ports import AGENT_ACTIVATE, AGENT_STAGE
from tests.properties.support.simulated_agent import SimulatedAgent
from tests.properties.support.staged_world import StagedWorld, serves


def boot_pod(world: StagedWorld, name: str) -> SimulatedAgent:
    """Recreate the pod of an engine: its agent answers, its copies are gone, and its engine still boots."""
    agent = world.agents[name]
    agent.up, agent.copies = False, {}
    return agent


def copying(world: StagedWorld) -> list[ev.Send]:
    """Return the calls under way that copy a complete version."""
    sends = [effect for effect in world.pending if isinstance(effect, ev.Send) and effect.path == AGENT_STAGE]
    return [send for send in sends if all(body["digest"] for body in send.bodies.values())]


def holding(world: StagedWorld) -> set[str]:
    """Return the engines whose pods have the complete committed version."""
    version = world.machine.fleet.weights.staged
    assert version is not None
    return {name for name, agent in world.agents.items() if version.update in agent.copies}


def served_world(engines: int = 3, **more: object) -> StagedWorld:
    """Return a fleet that serves version 1/1."""
    world = StagedWorld(engines, **more)  # type: ignore[arg-type]
    assert world.push("1").success
    assert serves(world, "1/1")
    return world


def test_a_new_pod_has_the_version_before_its_engine_answers() -> None:
    world = served_world()
    agent = boot_pod(world, "e2")
    world.settle()
    assert holding(world) == {"e0", "e1", "e2"}
    assert not agent.up
    for other in (world.store, world.agents["e0"], world.agents["e1"]):
        other.copies = {}  # nothing is left to copy from
    agent.restart()
    world.sync_all()
    world.drain()
    assert (agent.gate_open, str(agent.version)) == (True, "1/1")


def test_it_copies_from_pods_that_hold_the_version_and_last_from_the_store() -> None:
    world = served_world()
    boot_pod(world, "e2")
    world.sync_all()
    assert [send.bodies["e2"]["parents"] for send in copying(world)] == [["e0", "e1", STORE]]


def test_all_pods_are_new_and_the_store_feeds_them_while_they_boot() -> None:
    world = served_world()
    for name in world.agents:
        boot_pod(world, name)
    world.settle()
    assert holding(world) == set(world.agents)
    for agent in world.agents.values():
        agent.restart()
    assert serves(world, "1/1")


def test_as_many_pods_copy_at_a_time_as_the_policy_allows() -> None:
    world = served_world(6)
    for name in list(world.agents)[1:]:
        boot_pod(world, name)
    world.sync_all()
    assert len(copying(world)) == world.policy.catch_up.parallel == 4
    world.agents["e1"].answers = False  # its call hangs, and its place is free again once it counts as away
    for _ in range(4):
        world.tick(1)
        world.sync_all()
    assert [name for send in copying(world) for name in send.bodies] == ["e1", "e2", "e3", "e4", "e5"]


def test_a_copy_under_way_delays_no_call_of_a_trainer() -> None:
    world = served_world()
    boot_pod(world, "e2")
    world.sync_all()
    held = [world.pending.pop(world.pending.index(send)) for send in copying(world)]
    assert len(held) == 1
    assert world.do(rq.Pause("retract", {"mode": "retract"})).success
    assert world.push("2").success
    assert world.do(rq.Continue()).success
    world.pending.extend(held)
    world.settle()
    assert holding(world) == set(world.agents), "it copied version 1, found it old, and copied 2"
    world.agents["e2"].restart()
    assert serves(world, "1/2")


def test_an_engine_that_answers_while_its_pod_copies_loads_the_version_and_is_no_member_meanwhile() -> None:
    world = served_world()
    agent = boot_pod(world, "e2")
    world.sync_all()
    held = [world.pending.pop(world.pending.index(send)) for send in copying(world)]
    agent.restart()
    world.sync_all()
    assert list(world.machine.fleet.members()) == ["e0", "e1"]
    world.pending.insert(0, held[0])
    world.complete(broken=frozenset({"e2"}))  # the second call has ended the first one
    world.drain()
    assert (agent.gate_open, str(agent.version)) == (True, "1/1")
    assert world.machine.fleet.engines["e2"].retry_at <= world.now


def test_a_copy_that_fails_is_tried_again_and_does_not_keep_the_engine_waiting() -> None:
    world = served_world()
    agent = boot_pod(world, "e2")
    agent.peers = {}
    for _ in range(8):
        world.sync_all()
        world.drain()
        world.tick(11)
    calls = [send for send in world.sent if send.path == AGENT_STAGE and list(send.bodies) == ["e2"]]
    assert len(calls) >= 7
    world.connect()
    agent.restart()
    world.tick(11)
    world.sync_all()
    world.drain()
    assert (agent.gate_open, str(agent.version)) == (True, "1/1")


def test_with_one_copy_a_new_pod_does_not_copy_while_an_update_is_open() -> None:
    world = served_world(copies=1)
    opened = world.open_upload("2")
    boot_pod(world, "e2")
    world.settle()
    assert not copying(world)
    assert world.do(rq.WithdrawUpload(str(opened.fleet["update"]))).success


@pytest.mark.parametrize("draining", [False, True])
def test_engines_without_the_version_copy_it_in_a_paused_fleet_unless_they_leave(draining: bool) -> None:
    world = served_world()
    assert world.do(rq.Pause("retract", {"mode": "retract"})).success
    world.agents["e2"].restart()
    world.agents["e2"].copies = {}
    world.agents["e2"].draining = draining
    world.settle()
    assert ("e2" in holding(world)) is not draining


def test_engines_whose_pods_were_made_for_another_transport_do_not_fail_a_push() -> None:
    world = StagedWorld(3)
    assert world.push("1").success
    old = [world.agents["e0"], world.agents["e1"]]
    for agent in old:
        agent.takes_copies = False
        agent.copies.clear()
    world.agents["e2"].copies.clear()  # its pod is the first one that was made again, and has loaded nothing yet
    world.agents["e2"].restart()
    world.store.restart()
    world.settle()
    sent = len(world.sent)
    answer = world.push("2")
    assert answer.success, answer.message
    assert not {name for send in world.sent[sent:] if send.path in (AGENT_STAGE, AGENT_ACTIVATE) for name in send.bodies} & {"e0", "e1"}
    assert [agent.gate_open for agent in world.agents.values()] == [False, False, True]
    assert "made for another transport" in absent_sentence(world.machine.fleet)
    for agent in old:
        agent.takes_copies = True
        agent.restart()
    world.settle()
    assert serves(world, "1/2")


def test_a_push_waits_while_no_pod_was_made_for_transport_staged() -> None:
    world = StagedWorld(2)
    assert world.push("1").success
    for agent in world.agents.values():
        agent.takes_copies = False
    world.settle()
    update = str(world.open_upload("2").fleet["update"])
    world.fill_upload(update)
    call = world.ask(rq.CommitUpload(update))
    world.drain()
    assert call not in world.answers
    world.agents["e1"].takes_copies = True
    world.agents["e1"].restart()
    world.settle()
    assert world.answers[call].success
