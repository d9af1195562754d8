"""A fleet that demands signatures: unsigned updates are refused before an engine is called, and signed ones commit as all others do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.agent.signatures import PublicKeys
from sglang_rollout.agent.signatures import Signatures as AgentSignatures
from sglang_rollout.api.security_spec import Signatures
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.coordinator.update.requests import Answer
from sglang_rollout.coordinator.update.signatures import next_signing
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.ports import AGENT_ACK, AGENT_SIGNATURE
from sglang_rollout.wire.reasons import RefusalCode
from sglang_rollout.wire.record import Record, UpdateOutcome
from sglang_rollout.wire.signed import SIGNS_FIELD, SignedVersion
from sglang_rollout.wire.states import Version
from tests.properties.support.coordinator_world import SNAPSHOTS, World, group_body, push
from tests.support.signing import UID, make_pem, sign, write_public_keys

PEM, OTHER = make_pem(), make_pem()


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Return a fleet of two engines that demands signatures, with an open process group."""
    world = World([1, 1])
    world.uid, world.signatures = UID, Signatures(public_key_secret="keys")
    write_public_keys(tmp_path / "keys", PEM)
    for agent in world.agents.values():
        agent.signatures = AgentSignatures(PublicKeys(tmp_path / "keys"), UID)
    world.send_intent()
    world.settle()
    assert world.do(rq.OpenGroup(group_body(world, "g") | {SIGNS_FIELD: True})).success
    return world


def record(world: World) -> Record:
    found = world.machine.fleet.record()
    assert found is not None
    return found


def signed(world: World, label: str, pem: bytes = PEM) -> SignedVersion:
    signing = next_signing(world.machine.fleet, label)
    assert signing is not None
    return sign(pem, signing.version, signing.uid)


def push_signed(world: World, label: str, statement: SignedVersion | None = None) -> Answer:
    begun = world.do(rq.Begin(signed=statement or signed(world, label)))
    if not begun.success:
        return begun
    assert world.do(rq.Update("g", label, {"names": ["w"]})).success
    return world.do(rq.End())


def calls(world: World) -> list[str]:
    return [send.path for send in world.sent]


def test_a_signed_update_commits_and_the_record_keeps_the_signature(world: World) -> None:
    statement = signed(world, "5")
    answer = push_signed(world, "5", statement)
    assert answer.success, answer.message
    assert record(world).committed == statement.version == Version(run=1, step=5, label="5")
    assert record(world).signed == statement
    last = record(world).last_update
    assert last is not None
    assert last.signed_by == statement.key
    paths = calls(world)
    assert paths.index(AGENT_SIGNATURE) < paths.index(ControlCall.PAUSE.path), "agents verify before the fleet is paused"


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(rq.Begin(), id="begin"),
        pytest.param(rq.Update("g", "5", {"names": ["w"]}), id="update-without-session"),
        pytest.param(rq.FromDisk("/checkpoints/5", "5", {}), id="from-disk"),
    ],
)
def test_unsigned_updates_are_refused_before_an_engine_is_called(world: World, call: rq.Call) -> None:
    before, sent = world.machine.fleet.committed, len(world.sent)
    answer = world.do(call)
    assert (answer.status, "accepts signed updates only" in answer.message) == (403, True)
    assert (world.machine.fleet.committed, world.machine.fleet.phase.value) == (before, "idle")
    assert calls(world)[sent:] == []
    assert all(agent.gate_open for agent in world.agents.values())


@pytest.mark.parametrize("said", [{}, {SIGNS_FIELD: False}, {SIGNS_FIELD: "yes"}], ids=["nothing", "false", "text"])
def test_a_trainer_that_does_not_sign_opens_no_process_group(world: World, said: dict[str, Any]) -> None:
    sent = len(world.sent)
    answer = world.do(rq.OpenGroup(group_body(world, "h") | said))
    assert (answer.status, answer.code, "docs/how-to/sign-updates.md" in answer.message) == (403, RefusalCode.FORBIDDEN, True)
    assert calls(world)[sent:] == []


def test_engines_do_not_receive_that_the_trainer_signs(world: World) -> None:
    bodies = [body for send in world.sent if send.path == ControlCall.INIT_GROUP.path for body in send.bodies.values()]
    assert bodies
    assert not any(SIGNS_FIELD in body for body in bodies)


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        pytest.param(lambda good: sign(OTHER, good.version), 403, "is not known", id="another-key"),
        pytest.param(lambda good: sign(PEM, good.version, uid="other"), 403, "for another rollout", id="another-rollout"),
        pytest.param(lambda good: sign(PEM, Version(run=3, step=9, label="5")), 409, "becomes version 1/5", id="another-version"),
    ],
)
def test_a_wrong_signature_does_not_pause_the_fleet(
    world: World, change: Callable[[SignedVersion], SignedVersion], status: int, message: str
) -> None:
    answer = push_signed(world, "5", change(signed(world, "5")))
    assert (answer.status, message in answer.message) == (status, True), answer.message
    assert ControlCall.PAUSE.path not in calls(world)
    assert all(agent.gate_open for agent in world.agents.values())


def test_a_signature_is_not_accepted_twice(world: World) -> None:
    first = signed(world, "5")
    assert push_signed(world, "5", first).success
    answer = push_signed(world, "5", first)
    assert (answer.status, "becomes version 2/5" in answer.message) == (409, True)
    assert push_signed(world, "6").success


def test_one_engine_that_refuses_the_acknowledgement_fails_the_update(world: World, tmp_path: Path) -> None:
    statement = signed(world, "5")
    assert world.do(rq.Begin(signed=statement)).success
    assert world.do(rq.Update("g", "5", {"names": ["w"]})).success
    (tmp_path / "empty").mkdir()
    world.agents["e1"].signatures = AgentSignatures(PublicKeys(tmp_path / "empty"), UID)
    answer = world.do(rq.End())
    assert not answer.success
    assert "engine e1 did not acknowledge version 1/5: The key" in answer.message
    assert record(world).committed.is_base
    last = record(world).last_update
    assert last is not None
    assert last.outcome is UpdateOutcome.FAILED


def test_another_label_than_the_signed_one_does_not_commit(world: World) -> None:
    assert world.do(rq.Begin(signed=signed(world, "5"))).success
    assert world.do(rq.Update("g", "7", {"names": ["w"]})).success
    answer = world.do(rq.End())
    assert (answer.success, "The signature is for version 1/5" in answer.message) == (False, True)
    assert record(world).committed.is_base


def test_a_restarted_coordinator_and_an_engine_that_catches_up_use_the_recorded_signature(world: World) -> None:
    world.policy = world.policy.model_copy(update={"catch_up": world.policy.catch_up.model_copy(update={"disk": SNAPSHOTS})})
    world.send_intent()
    assert push_signed(world, "5").success
    world.settle()
    statement = record(world).signed
    world.start()
    world.settle()
    assert record(world).signed == statement
    agent = world.agents["e1"]
    agent.stocked = True
    agent.restart()
    world.settle()
    acks = [send.bodies["e1"] for send in world.sent if send.path == AGENT_ACK and "e1" in send.bodies]
    assert statement is not None
    assert acks[-1]["signed"] == statement.model_dump(mode="json")
    assert (agent.version, agent.gate_open) == (statement.version, True)


def test_an_unsigned_version_of_an_earlier_spec_is_not_loaded_from_disk() -> None:
    world = World([1, 1])
    world.policy = world.policy.model_copy(update={"catch_up": world.policy.catch_up.model_copy(update={"disk": SNAPSHOTS})})
    world.send_intent()
    world.sync_all()
    push(world, "5")
    agent = world.agents["e1"]
    agent.stocked, agent.signatures = True, AgentSignatures(PublicKeys(Path("/nowhere")), UID)
    agent.restart()
    world.settle()
    row = next(row for row in record(world).engines if row.name == "e1")
    assert "that version is not signed" in row.message
    assert not agent.gate_open


def test_engines_that_verify_still_demand_signatures_after_the_spec_has_changed(world: World) -> None:
    world.signatures = None
    world.send_intent()
    assert world.do(rq.Begin()).status == 403
    for agent in world.agents.values():
        agent.signatures = None
    world.sync_all()
    assert next_signing(world.machine.fleet, "5") is None
    assert push(world, "5") == Version(run=1, step=5, label="5")


def test_before_any_engine_verifies_signatures_an_update_waits(world: World) -> None:
    for agent in world.agents.values():
        agent.signatures = None
    world.sync_all()
    answer = push_signed(world, "5")
    assert (answer.status, "are being replaced" in answer.message) == (503, True)
