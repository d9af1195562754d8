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
from sglang_rollout.wire.ports import AGENT_ACK, AGENT_ACTIVATE, AGENT_SIGNATURE, STORE_OPEN
from sglang_rollout.wire.reasons import RefusalCode
from sglang_rollout.wire.record import Record, UpdateOutcome
from sglang_rollout.wire.signed import SIGNS_FIELD, SignedVersion
from sglang_rollout.wire.states import FleetState, Version
from tests.properties.support.coordinator_world import SNAPSHOTS, World, group_body, push
from tests.properties.support.simulated_agent import NAMES
from tests.properties.support.staged_world import StagedWorld, shard_of
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


def test_a_process_group_of_the_engines_takes_no_signature_of_a_copy(world: World) -> None:
    good = signed(world, "5")
    answer = push_signed(world, "5", sign(PEM, good.version, digest="d" * 64))
    assert (answer.status, "load no copies" in answer.message) == (400, True)
    assert AGENT_SIGNATURE not in calls(world)


# --- transport Staged --------------------------------------------------------------------------------------------------


@pytest.fixture
def staged(tmp_path: Path) -> StagedWorld:
    """Return a fleet of two engines with transport Staged that demands signatures with a digest."""
    write_public_keys(tmp_path / "keys", PEM)
    world = StagedWorld(2)
    world.uid, world.signatures = UID, Signatures(public_key_secret="keys", require_checksums=True)
    for agent in world.agents.values():
        agent.signatures = AgentSignatures(PublicKeys(tmp_path / "keys"), UID, require_checksums=True)
    world.send_intent()
    world.settle()
    return world


def upload(world: StagedWorld, label: str) -> str:
    """Upload a version, and return its update."""
    opened = world.do(rq.Upload((shard_of(NAMES),), label, signs=True))
    assert opened.success, opened.message
    world.fill_upload(str(opened.fleet["update"]))
    return str(opened.fleet["update"])


def sign_upload(world: StagedWorld, update: str, label: str, digest: str | None = None) -> SignedVersion:
    """Sign an upload as its trainer does, which knows the digest of what it has sent."""
    signing = next_signing(world.machine.fleet, label)
    assert signing is not None
    return sign(PEM, signing.version, signing.uid, digest=digest or world.store.digest_of(update))


def commit_signed(world: StagedWorld, label: str) -> SignedVersion:
    update = upload(world, label)
    statement = sign_upload(world, update, label)
    answer = world.do(rq.CommitUpload(update, signed=statement))
    assert answer.success, answer.message
    world.settle()
    return statement


def test_a_signed_upload_commits_once_and_its_commit_can_be_repeated(staged: StagedWorld) -> None:
    update = upload(staged, "5")
    statement = sign_upload(staged, update, "5")
    for _ in range(2):
        answer = staged.do(rq.CommitUpload(update, signed=statement))
        assert (answer.success, answer.fleet["state"]) == (True, "committed"), answer.message
    staged.settle()
    assert (record(staged).signed, staged.serving) == (statement, ["e0", "e1"])
    assert calls(staged).count(AGENT_SIGNATURE) == 1
    last = record(staged).last_update
    assert last is not None
    assert last.signed_by == statement.key


def test_an_upload_without_a_key_and_a_restore_are_refused_before_a_byte_moves(staged: StagedWorld) -> None:
    shards = (shard_of(NAMES),)
    unsigned = staged.do(rq.Upload(shards, "5"))
    assert (unsigned.status, "docs/how-to/sign-updates.md" in unsigned.message) == (403, True)
    restored = staged.do(rq.Upload(shards, "4-restored-5", source="a" * 32))
    assert (restored.status, "sglang-rollout weights export" in restored.message) == (403, True)
    assert STORE_OPEN not in calls(staged)


def test_an_unsigned_commit_is_refused_and_the_trainer_can_repeat_it_with_a_signature(staged: StagedWorld) -> None:
    update = upload(staged, "5")
    answer = staged.do(rq.CommitUpload(update))
    assert (answer.status, "is not signed" in answer.message) == (403, True)
    assert AGENT_ACTIVATE not in calls(staged)
    assert staged.do(rq.CommitUpload(update, signed=sign_upload(staged, update, "5"))).success


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        pytest.param(lambda good: sign(PEM, good.version, digest="d" * 64), 400, "the trainer signed dddd", id="another-digest"),
        pytest.param(lambda good: sign(PEM, good.version), 403, "has no digest", id="no-digest"),
        pytest.param(lambda good: sign(OTHER, good.version, digest=good.digest), 403, "is not known", id="another-key"),
        pytest.param(lambda good: good.model_copy(update={"digest": ""}), 403, "has no digest", id="digest-taken-out"),
        pytest.param(lambda good: good.model_copy(update={"digest": "d" * 64}), 403, "is not valid", id="digest-replaced"),
        pytest.param(
            lambda good: sign(PEM, good.version, uid="other", digest=good.digest), 403, "for another rollout", id="another-rollout"
        ),
        pytest.param(
            lambda good: sign(PEM, Version(run=3, step=9, label="5"), digest=good.digest), 409, "becomes version 1/5", id="another-version"
        ),
    ],
)
def test_a_wrong_signature_changes_no_engine(
    staged: StagedWorld, change: Callable[[SignedVersion], SignedVersion], status: int, message: str
) -> None:
    update = upload(staged, "5")
    answer = staged.do(rq.CommitUpload(update, signed=change(sign_upload(staged, update, "5"))))
    staged.settle()
    assert (answer.status, message in answer.message) == (status, True), answer.message
    assert AGENT_ACTIVATE not in calls(staged)
    assert (record(staged).committed.is_base, staged.serving) == (True, ["e0", "e1"])


def test_an_older_signed_version_is_not_accepted_again(staged: StagedWorld) -> None:
    first = commit_signed(staged, "5")
    commit_signed(staged, "6")
    update = upload(staged, "5")
    answer = staged.do(rq.CommitUpload(update, signed=first))
    assert (answer.status, "becomes version 2/5" in answer.message) == (409, True)


def test_engines_and_coordinators_that_restart_use_the_recorded_signature(staged: StagedWorld) -> None:
    statement = commit_signed(staged, "5")
    staged.start()
    staged.settle()
    assert record(staged).signed == statement
    for agent in staged.agents.values():
        agent.restart()
    staged.agents["e1"].copies.clear()
    staged.settle()
    assert staged.serving == ["e0", "e1"]


def test_a_fleet_that_was_powered_off_verifies_its_snapshot_with_the_recorded_signature(staged: StagedWorld) -> None:
    staged.store.snapshots = {}
    statement = commit_signed(staged, "5")
    staged.store.restart()
    for agent in staged.agents.values():
        agent.restart()
        agent.copies.clear()
    staged.start()
    staged.settle()
    assert (staged.serving, record(staged).signed) == (["e0", "e1"], statement)
    assert staged.versions() == {"e0": "1/5", "e1": "1/5"}


def test_an_engine_without_a_signature_of_the_committed_version_waits_for_the_next_signed_push(staged: StagedWorld) -> None:
    commit_signed(staged, "5")
    staged.machine.fleet.weights.signed = None
    staged.agents["e1"].restart()
    staged.settle()
    row = next(row for row in record(staged).engines if row.name == "e1")
    assert (staged.serving, "that version is not signed" in row.message) == (["e0"], True), row.message
    commit_signed(staged, "6")
    assert staged.serving == ["e0", "e1"]


def test_engines_that_load_in_turn_verify_the_kept_signature(tmp_path: Path) -> None:
    write_public_keys(tmp_path / "keys", PEM)
    world = StagedWorld(3, in_turn=1)
    world.uid, world.signatures = UID, Signatures(public_key_secret="keys")
    for agent in world.agents.values():
        agent.signatures = AgentSignatures(PublicKeys(tmp_path / "keys"), UID)
    world.send_intent()
    world.settle()
    commit_signed(world, "5")
    statement = commit_signed(world, "6")
    loads = [body["ack"]["signed"] for send in world.sent if send.path == AGENT_ACTIVATE for body in send.bodies.values()]
    assert loads[-3:] == [statement.model_dump(mode="json")] * 3
    assert world.versions() == dict.fromkeys(("e0", "e1", "e2"), "1/6")


def test_a_trainer_with_a_process_group_signs_no_digest(staged: StagedWorld) -> None:
    for agent in staged.agents.values():
        assert agent.signatures is not None
        agent.signatures._require_checksums = False
    body = {"master_address": "10.0.0.9", "master_port": 7, "rank_offset": 1, "group_name": "g", "world_size": 2, SIGNS_FIELD: True}
    assert staged.do(rq.OpenGroup(body)).success
    assert staged.do(rq.Begin(signed=signed(staged, "5"))).success
    assert staged.send_tensors("5").success
    assert staged.do(rq.End()).success
    staged.settle()
    assert staged.versions() == {"e0": "1/5", "e1": "1/5"}


def test_engines_that_wake_load_their_copies_again_because_a_digest_proves_no_memory(staged: StagedWorld) -> None:
    commit_signed(staged, "5")
    staged.set_state(FleetState.ASLEEP)
    staged.settle()
    assert staged.serving == []
    sent = len(staged.sent)
    staged.set_state(FleetState.ACTIVE)
    staged.settle()
    assert staged.serving == ["e0", "e1"]
    assert AGENT_ACTIVATE in calls(staged)[sent:]
