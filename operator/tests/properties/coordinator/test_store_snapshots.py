"""Snapshots of the weight store: a fleet whose pods all ended serves its version again, and never another one by itself."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.catch_up import SNAPSHOT_SECONDS, find_source
from sglang_rollout.coordinator.update.events import Send
from sglang_rollout.coordinator.update.snapshots import why_lost
from sglang_rollout.coordinator.update.store import STORE
from sglang_rollout.wire.ports import STORE_COMMIT, STORE_FETCH
from tests.properties.support.staged_world import StagedWorld, serves


def world_with_snapshots(engines: int = 2) -> StagedWorld:
    world = StagedWorld(engines)
    world.store.snapshots = {}
    return world


def power_off(world: StagedWorld) -> None:
    """End all pods: engines and weight store come back empty, and a new coordinator has the record only."""
    world.store.restart()
    for name in list(world.agents):
        world.add_agent(name)
    world.start()
    world.settle()


def commits(world: StagedWorld) -> list[dict[str, Any]]:
    return [dict(body) for send in world.sent if isinstance(send, Send) and send.path == STORE_COMMIT for body in send.bodies.values()]


def update_of(world: StagedWorld, version: str) -> str:
    assert world.store.snapshots is not None
    return next(update for update, copy in world.store.snapshots.items() if str(copy.version) == version)


def test_the_store_learns_of_each_commit_and_again_after_its_restart() -> None:
    world = world_with_snapshots()
    world.push("1", caller="team/trainer")
    world.settle()
    (first,) = commits(world)
    assert (first["version"]["label"], first["author"]) == ("1", "team/trainer")
    world.push("2", caller="team/trainer")
    world.settle()
    assert [body["version"]["label"] for body in commits(world)] == ["1", "2"]
    world.store.restart()
    world.settle()
    assert world.store.committed == commits(world)[-1]["update"]
    assert len(commits(world)) == 3


def test_a_store_that_refuses_the_news_is_asked_again_and_no_push_fails() -> None:
    world = world_with_snapshots()
    assert world.open_group().success
    assert world.do(rq.Begin()).success
    assert world.send_tensors("1").success
    call = world.ask(rq.End())
    world.drain(failing=STORE_COMMIT, engines=[STORE])
    assert world.answers[call].success
    assert world.store.snapshots == {}
    world.tick(30)
    world.settle()
    assert update_of(world, "1/1")
    assert serves(world, "1/1")


def test_a_fleet_whose_pods_all_ended_serves_its_version_again_without_a_push() -> None:
    world = world_with_snapshots()
    world.push("1")
    world.push("2")
    assert serves(world, "1/2")
    power_off(world)
    assert serves(world, "1/2")


def test_a_store_that_cannot_copy_from_the_agents_loads_its_snapshot_at_once() -> None:
    """As when the pods of engines and store are deleted together: an agent that ends still reports its copy."""
    world = world_with_snapshots()
    world.push("1")
    world.settle()
    world.store.restart()
    world.store.peers = {}
    world.settle()
    parents = [send.bodies[STORE]["parents"] for send in world.sent if send.path == STORE_FETCH]
    assert parents == [["e0", "e1"], []]
    seconds = [send.bodies[STORE]["deadline"] for send in world.sent if send.path == STORE_FETCH]
    assert seconds == [world.policy.deadlines.stage_seconds, SNAPSHOT_SECONDS], "a volume is slower than memory"
    staged = world.machine.fleet.weights.staged
    assert staged is not None
    assert world.store.copies[staged.update].digest == staged.digest


@pytest.mark.parametrize("damage", ["damaged", "missing"])
def test_without_a_usable_snapshot_of_the_committed_version_no_engine_serves_an_older_one(damage: str) -> None:
    world = world_with_snapshots()
    world.push("1")
    world.push("2")
    world.settle()
    if damage == "damaged":
        world.store.damaged.add(update_of(world, "1/2"))
    else:
        assert world.store.snapshots is not None
        del world.store.snapshots[update_of(world, "1/2")]
    power_off(world)
    world.tick(60)
    world.settle()
    assert world.serving == []
    message = why_lost(world.machine.fleet)
    assert "No pod and no usable snapshot has the committed version 1/2" in message
    assert "sglang-rollout weights export" in message
    assert "1/1 (label 1)" in message
    assert find_source(world.machine.fleet) is None, "no engine waits for a copy, which would keep it out of updates"
    assert len(world.machine.fleet.members()) == 2


def test_the_record_says_that_the_newest_snapshot_could_not_be_written() -> None:
    world = world_with_snapshots()
    world.push("1")
    world.store.message = "The volume is full."
    world.settle()
    saved = world.machine.fleet.record()
    assert saved is not None
    assert saved.snapshot_problem == "The volume is full."
