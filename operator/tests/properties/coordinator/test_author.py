"""Every version has an author: the caller whose tensors the engines received. Later calls of other callers do not change it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sglang_rollout.api.security_spec import Security
from sglang_rollout.api.weights_spec import Transport
from sglang_rollout.coordinator.callers.pods import Caller
from sglang_rollout.coordinator.callers.policy import AccountToken, Credential, Policy, StaticToken, authorize
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.requests import Answer, AtEngine
from sglang_rollout.wire.access import PathKind
from sglang_rollout.wire.record import Record, UpdateOutcome, UpdateReason
from sglang_rollout.wire.states import FleetMode
from tests.properties.support.coordinator_world import World, group_body
from tests.support.pods import make_pod, make_table

ANNE, BEN = "ml/Job/anne", "ml/Job/ben"
EXPIRED = 21.0
"""Seconds after which the lease of a silent trainer has expired."""


def make() -> World:
    world = World([1, 1])
    world.sync_all()
    return world


def record(world: World) -> Record:
    found = world.machine.fleet.record()
    assert found is not None
    return found


def authors(world: World) -> tuple[str, str | None]:
    """Return the author of the committed version and that of the last update."""
    found = record(world)
    return found.author, found.last_update.author if found.last_update is not None else None


def open_update(world: World, caller: str, group: str = "g") -> None:
    assert world.do(rq.OpenGroup(group_body(world, group)), caller).success
    assert world.do(rq.Begin(), caller).success
    assert world.do(rq.Update(group, None, {"names": ["w"]}), caller).success


def push(world: World, caller: str, group: str = "g") -> None:
    open_update(world, caller, group)
    assert world.do(rq.End(), caller).success


def push_from_disk(world: World, caller: str) -> None:
    assert world.do(rq.FromDisk("/checkpoints/7", None, {}), caller).success


def push_without_session(world: World, caller: str) -> None:
    assert world.do(rq.OpenGroup(group_body(world, "g")), caller).success
    assert world.do(rq.Pause("retract"), caller).success
    assert world.do(rq.Update("g", None, {"names": ["w"]}), caller).success
    assert world.do(rq.Continue(), caller).success


@pytest.mark.parametrize("push_", [push, push_from_disk, push_without_session])
def test_the_caller_of_a_push_is_the_author_of_its_version(push_: Callable[[World, str], None]) -> None:
    world = make()
    assert authors(world) == ("", None), "no caller pushed the weights of model.path"
    push_(world, ANNE)
    assert authors(world) == (ANNE, ANNE)


POD = make_pod("train-0")
NODES = {"trainers": {"cidrs": ["10.4.0.0/16"]}}


@pytest.mark.parametrize(
    ("address", "credential", "security", "author"),
    [
        ("10.0.0.1", None, {}, "ml/Job/train"),
        ("10.4.0.17", None, NODES, "10.4.0.17"),
        ("10.9.9.9", StaticToken(), {"control": "Token"}, "token"),
        ("10.9.9.9", AccountToken("ml", "trainer", POD["metadata"]["uid"]), {}, "ml/Job/train"),
        ("10.9.9.9", AccountToken("ml", "ci"), {"trainers": {"serviceAccounts": ["ci"]}}, "ServiceAccount ml/ci"),
        ("10.9.9.9", None, {"control": "Open"}, "10.9.9.9"),
        ("10.0.0.1", None, {"control": "Open"}, "ml/Job/train"),
    ],
)
def test_every_kind_of_caller_is_an_author(address: str, credential: Credential, security: dict[str, Any], author: str) -> None:
    caller = authorize(PathKind.CONTROL, address, credential, make_table(POD), Policy(Security.model_validate(security), namespace="ml"))
    assert isinstance(caller, Caller)
    world = make()
    push(world, str(caller))
    assert authors(world) == (author, author)


def test_a_fleet_that_loads_from_disk_only_has_authors() -> None:
    world = World([1, 1])
    world.policy = world.policy.model_copy(update={"transport": Transport.DISK})
    world.send_intent()
    world.sync_all()
    push_from_disk(world, BEN)
    assert authors(world) == (BEN, BEN)


def test_a_failed_update_of_another_trainer_leaves_the_author_of_the_committed_version() -> None:
    world = make()
    push(world, ANNE)
    world.tick(EXPIRED)
    open_update(world, BEN, "h")
    assert world.do(rq.Continue(), BEN).status == 400
    assert authors(world) == (ANNE, BEN)


def test_an_update_that_is_taken_over_keeps_its_author() -> None:
    world = make()
    push(world, ANNE)
    assert world.do(rq.Begin(), ANNE).success
    assert world.do(rq.Claim(take_over=True), BEN).success
    assert authors(world) == (ANNE, ANNE)
    assert world.do(rq.Begin(), BEN).success
    assert world.do(rq.Update("g", None, {"names": ["w"]}), BEN).success
    assert world.do(rq.End(), BEN).success
    assert authors(world) == (BEN, BEN)


@pytest.mark.parametrize(
    "call", [rq.End(), rq.Flush(), rq.Continue(), rq.SetLabel("9"), rq.CloseGroup("g")], ids=lambda call: type(call).__name__
)
def test_another_trainer_ends_no_update_that_is_not_its_own(call: rq.Call) -> None:
    world = make()
    open_update(world, ANNE)
    world.tick(EXPIRED)
    refused = world.do(call, BEN)
    assert (refused.status, refused.fleet["holder"]) == (409, ANNE)
    assert f"The open update belongs to another trainer: {ANNE}." in refused.message
    assert world.do(rq.End(), ANNE).success
    assert authors(world) == (ANNE, ANNE)


@pytest.mark.parametrize("call", [rq.Begin(), rq.Update("g", None, {"names": ["w"]}), rq.Pause("retract"), rq.Claim()])
def test_a_trainer_whose_lease_expired_loses_its_update_to_the_next_trainer(call: rq.Call) -> None:
    world = make()
    open_update(world, ANNE)
    world.tick(EXPIRED)
    assert world.do(call, BEN).success
    last = record(world).last_update
    assert last is not None
    assert (last.outcome, last.author) == (UpdateOutcome.FAILED, ANNE)
    assert world.machine.fleet.update is None or world.machine.fleet.update.author == BEN


@pytest.mark.parametrize("call", [rq.Flush(), rq.NewRun(), rq.Continue()], ids=lambda call: type(call).__name__)
def test_every_call_abandons_the_update_of_a_trainer_without_pods(call: rq.Call) -> None:
    world = make()
    open_update(world, ANNE)
    world.gone = ANNE
    assert world.do(call, BEN).success
    last = record(world).last_update
    assert last is not None
    assert (last.outcome, last.author, last.reason) == (UpdateOutcome.FAILED, ANNE, UpdateReason.TAKEN_OVER)
    assert authors(world) == ("", ANNE), "the tensors were not committed"


def test_a_pause_that_is_given_up_names_the_trainer_that_paused() -> None:
    world = make()
    assert world.do(rq.Pause("retract"), ANNE).success
    world.tick(EXPIRED)
    assert world.do(rq.OpenGroup(group_body(world, "h")), BEN).success
    world.tick(10_000)
    world.drain()
    last = record(world).last_update
    assert last is not None
    assert (last.outcome, last.author) == (UpdateOutcome.ABORTED, ANNE)


# --- trainers that share GPUs with the engines ------------------------------------------------------------------------


def hybrid() -> World:
    world = World([1, 1])
    world.mode = FleetMode.HYBRID
    world.send_intent()
    world.settle()
    return world


def send_tensors(world: World, engine: str, handle: str, caller: str) -> Answer:
    woken = world.do(AtEngine(engine, rq.ResumeMemory(("weights",))), caller)
    assert woken.success, woken
    return world.do(AtEngine(engine, rq.Tensors(None, {"serialized_named_tensors": [handle], "flush_cache": False})), caller)


def end_push(world: World, caller: str) -> None:
    for engine in world.agents:
        assert world.do(AtEngine(engine, rq.ResumeMemory(("kv_cache",))), caller).success


def test_all_ranks_of_a_trainer_that_shares_gpus_are_one_author() -> None:
    world = hybrid()
    for engine in world.agents:
        assert send_tensors(world, engine, "a", ANNE).success
    end_push(world, ANNE)
    assert authors(world) == (ANNE, ANNE)


def test_tensors_of_two_trainers_never_become_one_version() -> None:
    world = hybrid()
    assert send_tensors(world, "e0", "a", ANNE).success
    world.tick(EXPIRED)
    # The trainer still has the memory of e1, so its lease lasts.
    assert world.do(AtEngine("e1", rq.ResumeMemory(("weights",))), BEN).status == 409
    assert world.do(rq.Claim(take_over=True), BEN).success
    assert send_tensors(world, "e1", "b", BEN).success
    assert world.machine.fleet.update is not None
    assert (world.machine.fleet.update.author, set(world.machine.fleet.update.boots)) == (BEN, {"e1"})
    assert authors(world) == ("", ANNE)
    assert send_tensors(world, "e0", "b", BEN).success
    end_push(world, BEN)
    assert authors(world) == (BEN, BEN)
    assert [agent.handles for agent in world.agents.values()] == [["b"], ["b"]]


# --- restarts of the coordinator --------------------------------------------------------------------------------------


def test_a_restarted_coordinator_knows_the_authors() -> None:
    world = make()
    push(world, ANNE)
    world.start()
    world.sync_all()
    assert authors(world) == (ANNE, ANNE)


def test_an_update_that_a_restart_interrupts_has_its_author() -> None:
    world = make()
    push(world, ANNE)
    world.tick(EXPIRED)
    open_update(world, BEN, "h")
    world.start()
    world.sync_all()
    assert authors(world) == (ANNE, BEN)


def commit_without_record(world: World, caller: str) -> None:
    """Push while the store fails: only the engines know of the commit."""
    open_update(world, caller, "h")
    world.store_fails = True
    assert world.do(rq.End(), caller).success
    world.store_fails = False


def test_a_commit_that_only_the_engines_prove_has_its_author() -> None:
    world = make()
    push(world, ANNE)
    world.tick(EXPIRED)
    commit_without_record(world, BEN)
    version = world.machine.fleet.committed
    world.start()
    world.sync_all()
    assert world.machine.fleet.committed == version
    last = record(world).last_update
    assert last is not None
    assert (last.version, last.outcome, last.engines) == (version, UpdateOutcome.COMMITTED, ["e0", "e1"])
    assert authors(world) == (BEN, BEN)


def test_a_commit_that_is_proved_late_has_its_author() -> None:
    world = make()
    push(world, ANNE)
    world.tick(EXPIRED)
    commit_without_record(world, BEN)
    version = world.machine.fleet.committed
    world.start()
    world.tick(6)  # the agents are heard after the coordinator has given up waiting
    world.sync_all()
    world.run_round()
    assert world.machine.fleet.committed == version
    assert authors(world) == (BEN, BEN)


def test_catching_up_changes_no_author() -> None:
    world = make()
    push_from_disk(world, ANNE)
    world.agents["e1"].restart()
    world.settle()
    assert [agent.version for agent in world.agents.values()] == [world.machine.fleet.committed] * 2
    assert authors(world) == (ANNE, ANNE)
