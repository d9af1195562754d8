"""A push is signed if the trainer has a key and the fleet demands signatures."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from sglang_rollout.trainer import FleetError, PushFailed, connect
from sglang_rollout.trainer.fleet import Fleet
from sglang_rollout.trainer.push import PushOptions
from sglang_rollout.trainer.signing import SIGNING_KEY_VARIABLE, SigningKey, find_signing_key
from sglang_rollout.wire.signed import SignedVersion
from tests.support.signing import make_pem
from tests.unit.trainer.support.scripted_fleet import FakeFleet, document

PEM = make_pem()
SIGNING = {"uid": "u-1", "version": {"run": 1, "step": 7, "label": "7"}}


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SIGNING_KEY_VARIABLE, raising=False)


def statement(fleet: Fleet, label: str = "7", checksums: dict[int, list[str]] | None = None) -> SignedVersion | None:
    return fleet._sign(PushOptions(label, bucket_bytes=8, timeout=1.0, checksums=checksums or {}))


def test_the_signature_names_what_the_fleet_asks_for(fake: FakeFleet, tmp_path: Path) -> None:
    fake.replies["/fleet?label=7"] = (200, document(signing=SIGNING))
    file = tmp_path / "key.pem"
    file.write_bytes(PEM)
    for given in (PEM, file, str(file)):
        with connect(fake.url, signing_key=given) as fleet:
            signed = statement(fleet, checksums={1: ["ab"]})
        assert signed is not None
        assert (signed.uid, signed.run, signed.step, signed.label, signed.checksums) == ("u-1", 1, 7, "7", {1: ("ab",)})
        key: Any = load_pem_private_key(PEM, None)
        key.public_key().verify(base64.b64decode(signed.signature), signed.text)


def test_the_signed_text_is_what_the_documentation_says() -> None:
    signed = SignedVersion(uid="u", run=1, step=7, label="é", checksums={2: ("a", "b")}, key="0" * 16, signature="")
    expected = b'sglang-rollout-update-v1\n{"checksums":{"2":["a","b"]},"label":"\\u00e9","run":1,"step":7,"uid":"u"}'
    assert signed.text == expected
    with_digest = signed.model_copy(update={"checksums": {}, "label": "7", "digest": "ab" * 32})
    digest = b"ab" * 32
    assert with_digest.text == (
        b'sglang-rollout-update-v1\n{"checksums":{},"digest":"' + digest + b'","label":"7","run":1,"step":7,"uid":"u"}'
    )


def test_without_a_key_or_a_demand_nothing_is_signed(fake: FakeFleet) -> None:
    with connect(fake.url) as fleet:
        assert statement(fleet) is None
    fake.replies["/fleet?label=7"] = (200, document())
    with connect(fake.url, signing_key=PEM) as fleet:
        assert statement(fleet) is None


def test_a_fleet_that_asks_for_another_label_gets_no_signature(fake: FakeFleet) -> None:
    fake.replies["/fleet?label=8"] = (200, document(signing=SIGNING))
    with connect(fake.url, signing_key=PEM) as fleet, pytest.raises(PushFailed, match="with the label '7', not '8'"):
        statement(fleet, "8")


def test_the_variable_names_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert find_signing_key(None) is None
    file = tmp_path / "key.pem"
    file.write_bytes(PEM)
    monkeypatch.setenv(SIGNING_KEY_VARIABLE, str(file))
    found = find_signing_key(None)
    assert found is not None
    assert found.id == SigningKey(PEM).id


def test_keys_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="cannot be read"):
        find_signing_key(tmp_path / "none.pem")
    with pytest.raises(FleetError, match="no private key in PEM"):
        find_signing_key(b"text")


def test_the_key_id_is_the_sha256_of_the_public_key_as_openssl_prints_it(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(file)], check=True)
    command = f"openssl pkey -in {file} -pubout -outform DER | sha256sum | head -c 16"
    printed = subprocess.run(["sh", "-c", command], check=True, capture_output=True, text=True).stdout
    assert SigningKey(file.read_bytes()).id == printed
