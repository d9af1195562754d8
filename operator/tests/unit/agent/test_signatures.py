"""Which versions an agent with public keys accepts."""

from __future__ import annotations

import base64
import logging
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.agent import events as ev
from sglang_rollout.agent import state as s
from sglang_rollout.agent.signatures import PublicKeys, Signatures
from sglang_rollout.agent.state import EngineRecord
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.agent import AckRequest
from sglang_rollout.wire.signed import SignedVersion
from sglang_rollout.wire.states import BASE, Version
from tests.support.signing import UID, make_pem, public_pem, sign, write_public_keys

PEM, OTHER = make_pem(), make_pem()
V5, V6 = Version(run=1, step=5, label="5"), Version(run=1, step=6, label="6")
DIGEST = "d" * 64
SUMS = {1: ("ab",), 2: ("cd", "ef")}
EMPTY = EngineRecord()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_public_keys(tmp_path / "keys", PEM)
    return tmp_path / "keys"


@pytest.fixture
def signatures(folder: Path) -> Signatures:
    return Signatures(PublicKeys(folder), UID)


def refusal(signatures: Signatures, signed: SignedVersion | None, version: Version = V5, record: EngineRecord = EMPTY) -> str:
    """Return why an acknowledgement is refused; empty if it is not."""
    request = AckRequest(version=version, boot_id="b", cohort=["e0"], signed=signed)
    found = signatures.ack_refusal(request, record, 1)
    return "" if found is None else found.message


def test_a_signed_version_is_accepted(signatures: Signatures) -> None:
    assert refusal(signatures, sign(PEM, V5, checksums=SUMS)) == ""


def test_what_is_not_accepted(signatures: Signatures) -> None:
    good = sign(PEM, V5)
    assert "is not signed" in refusal(signatures, None)
    assert "for another rollout" in refusal(signatures, sign(PEM, V5, uid="another"))
    assert f"The key {sign(OTHER, V5).key} is not known: the keys are {good.key}" in refusal(signatures, sign(OTHER, V5))
    assert "is not valid" in refusal(signatures, sign(OTHER, V5).model_copy(update={"key": good.key}))
    assert "is not valid" in refusal(signatures, good.model_copy(update={"signature": "not base64"}))
    assert "The signature is for version 1/6 (label 6), not 1/5 (label 5)" in refusal(signatures, sign(PEM, V6))


CHANGES: dict[str, Any] = {
    "uid": st.text(min_size=1, max_size=40),
    "run": st.integers(1, 10**6),
    "step": st.integers(0, 10**6),
    "label": st.text(min_size=1, max_size=40),
    "digest": st.sampled_from(["", "0" * 64]),
    "checksums": st.dictionaries(st.integers(1, 8), st.lists(st.text(max_size=8), max_size=3).map(tuple), max_size=3),
    "signature": st.binary(min_size=64, max_size=64).map(lambda raw: base64.b64encode(raw).decode()),
}


@given(st.sampled_from(sorted(CHANGES)).flatmap(lambda name: st.tuples(st.just(name), CHANGES[name])))
def test_a_signature_covers_every_field(tmp_path_factory: pytest.TempPathFactory, change: tuple[str, Any]) -> None:
    folder = tmp_path_factory.getbasetemp() / "signed-fields"
    write_public_keys(folder, PEM)
    name, value = change
    good = sign(PEM, V5, checksums=SUMS, digest=DIGEST)
    changed = good.model_copy(update={name: value})
    if changed == good:
        return
    # Also an agent of the rollout that the changed field names refuses it.
    found = Signatures(PublicKeys(folder), changed.uid).ack_refusal(
        AckRequest(version=changed.version, boot_id="b", cohort=["e0"], signed=changed), EMPTY, 1
    )
    assert found is not None
    assert "is not valid" in found.message


def test_an_older_version_than_the_engine_has_served_is_refused(signatures: Signatures) -> None:
    record = EngineRecord(newest_served=V6)
    assert "Version 1/5 is older than version 1/6" in refusal(signatures, sign(PEM, V5), record=record)
    assert refusal(signatures, sign(PEM, V6), V6, record) == ""
    restarted = Version(run=2, step=1, label="1")
    assert refusal(signatures, sign(PEM, restarted), restarted, record) == ""


def test_checksums_can_be_required(folder: Path) -> None:
    strict = Signatures(PublicKeys(folder), UID, require_checksums=True)
    missing = "no digest, and no checksums for an engine with tensor parallel size 1"
    assert missing in refusal(strict, sign(PEM, V5))
    assert missing in refusal(strict, sign(PEM, V5, checksums={2: ("a", "b")}))
    assert refusal(strict, sign(PEM, V5, checksums=SUMS)) == ""
    assert refusal(strict, sign(PEM, V5, digest=DIGEST)) == ""


def test_a_signed_digest_must_be_that_of_the_copy() -> None:
    signed = sign(PEM, V5, digest=DIGEST)
    assert Signatures.digest_refusal(signed, DIGEST) is None
    other, none = Signatures.digest_refusal(signed, "e" * 64), Signatures.digest_refusal(signed, "")
    assert other is not None
    assert other.message == (
        "The trainer signed version 1/5 with the digest dddddddddddd…, and the pod's copy has the digest eeeeeeeeeeee…."
    )
    assert none is not None
    assert "has not loaded a copy with this digest" in none.message
    assert Signatures.digest_refusal(sign(PEM, V5), "e" * 64) is None


def test_base_needs_no_signature_unless_weights_were_received(signatures: Signatures) -> None:
    assert refusal(signatures, None, BASE) == ""
    assert "has received weights" in refusal(signatures, None, BASE, EngineRecord(written=True))


def test_keys_are_read_again_when_the_files_change(folder: Path, signatures: Signatures) -> None:
    assert refusal(signatures, sign(PEM, V5)) == ""
    write_public_keys(folder, PEM, OTHER)
    assert refusal(signatures, sign(OTHER, V5)) == ""
    (folder / "0.pem").unlink()
    assert "is not known" in refusal(signatures, sign(PEM, V5))
    (folder / "1.pem").unlink()
    assert "the Secret of security.signatures has no key" in refusal(signatures, sign(OTHER, V5))


def test_files_without_a_usable_key_are_named_in_the_log(folder: Path, signatures: Signatures, caplog: pytest.LogCaptureFixture) -> None:
    rsa = generate_private_key(65537, 2048).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (folder / "rsa.pem").write_bytes(rsa)
    (folder / "text.pem").write_text("no key")
    (folder / "other.txt").write_bytes(public_pem(OTHER))
    with caplog.at_level(logging.WARNING):
        assert refusal(signatures, sign(PEM, V5)) == ""
    assert "rsa.pem is no Ed25519 key" in caplog.text
    assert "text.pem is no public key in PEM" in caplog.text
    assert "is not known" in refusal(signatures, sign(OTHER, V5))


def test_the_record_notes_what_was_served_and_what_was_written() -> None:
    state = s.State()

    def apply(*events: ev.Event) -> EngineRecord:
        nonlocal state
        for event in events:
            state, _ = ev.step(state, event)
        return state.record

    facts = s.EngineFacts("b1", "base", "base")
    record = apply(ev.EngineIdentified(facts), ev.CoordinatorCalled(1, BASE))
    assert (record.newest_served, record.written) == (BASE, False)
    record = apply(ev.CallBegan(ControlCall.UPDATE_DISK), ev.CallEnded(ControlCall.UPDATE_DISK, ok=True, boot_id="b1"))
    assert record.written
    record = apply(ev.UpdateAcknowledged(V6, ("e0",)))
    assert record.newest_served == BASE, "the version is not committed yet"
    assert apply(ev.CoordinatorCalled(1, V6)).newest_served == V6
    record = apply(ev.EngineIdentified(s.EngineFacts("b2", "base", "base")))
    assert (record.newest_served, record.written, record.version) == (V6, False, BASE)
    assert apply(ev.CoordinatorCalled(1, BASE)).newest_served == V6, "a committed version that goes back is not believed"
