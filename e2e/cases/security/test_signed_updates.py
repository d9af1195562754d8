"""Fleets with ``security.signatures``: an unsigned update changes nothing, and a signed one is committed.

The signature of a push is refused when it comes again. With transport Staged, engines that restart load the signed version again.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import requests
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from e2e import machine_token, stand_in
from e2e.cases.actions import KILL, document, serving
from e2e.cases.conftest import ready, remove
from e2e.held_tensors import HeldTensor, held_tensors
from e2e.kube import Kubectl, eventually
from sglang_rollout.trainer import PushFailed, connect
from sglang_rollout.trainer.push import PushOptions
from sglang_rollout.trainer.signing import SigningKey
from sglang_rollout.trainer.tensors import Source
from sglang_rollout.trainer.upload import Upload
from sglang_rollout.wire.ports import FRONT_PORT
from sglang_rollout.wire.trainer import Signing

NAME, KEYS = "signed", "signing-keys"
KEY = Ed25519PrivateKey.generate()
PUSH = """
import json, sys
import torch
from e2e.chaos.trainer import policy
from sglang_rollout.testing import StandIn
from sglang_rollout.trainer import FleetError, connect
from sglang_rollout.wire.signed import SignedVersion
url, label, signed = sys.argv[1:]
with StandIn() as stand_in:
    shapes = {name: (tuple(held.shape), getattr(torch, held.dtype)) for name, held in stand_in.tensors().items()}
with connect(url, timeout=60) as fleet:
    if signed:  # by the machine of the test, because this pod has no package cryptography
        fleet._groups._signs = True
        fleet._sign = lambda options: SignedVersion.model_validate_json(signed)
    try:
        print(json.dumps({"pushed": fleet.push(policy(label, shapes), version=label, timeout=60).version}))
    except FleetError as error:
        print(json.dumps({"failed": str(error)}))
"""


@dataclass
class SignedRollout:
    """A fleet of two stand-in engines that accepts signed updates only."""

    kubectl: Kubectl
    url: str

    def sign(self, label: str) -> str:
        """Return the next version with this label, signed, as JSON."""
        found = requests.get(f"{self.url}/fleet", params={"label": label}, headers=machine_token.HEADERS, timeout=10).json()
        pem = KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return SigningKey(pem).sign(Signing.model_validate(found["signing"]), label, {}).model_dump_json()

    def push(self, label: str, signed: str = "") -> dict[str, str]:
        """Push from the client's pod, and return the outcome."""
        words = (f"http://{NAME}-router:{FRONT_PORT}", label, signed)
        out = self.kubectl.exec("client", "python", "-", *words, stdin=PUSH, timeout=240)
        return dict(json.loads(out.strip().splitlines()[-1]))

    def upload(self, step: int, *, signs: bool = True) -> Mapping[str, Any]:
        """Upload the weights of a step from here, and return how the update ended."""
        pem = KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) if signs else None
        source = Source(held_tensors(step))
        options = PushOptions(str(step), 1 << 20, 120.0)
        source.check(options.bucket_bytes)
        with connect(self.url, token=machine_token.TOKEN, signing_key=pem) as fleet:
            sign = partial(fleet._sign, options) if signs else None
            made = Upload(fleet._http, options, wait="committed", read_bytes=HeldTensor.read, sign=sign)
            made.run(source)
            return made.result(epoch=1)

    def state(self) -> tuple[Any, ...]:
        """Return what an update changes."""
        found = document(self.url)
        return found["committed"], found["serving"], found["phase"], [member["boot_id"] for member in found["members"]]


def public_key() -> dict[str, Any]:
    """Return the Secret with the public key."""
    pem = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": KEYS}, "data": {"trainer.pem": base64.b64encode(pem).decode()}}


@pytest.fixture
def signed_fleet(kubectl: Kubectl, client: str) -> Iterator[SignedRollout]:
    with run_fleet(kubectl) as made:
        yield made


@pytest.fixture
def staged_fleet(kubectl: Kubectl, client: str) -> Iterator[SignedRollout]:
    with run_fleet(kubectl, {"transport": "Staged", "staging": {"sizeLimit": "32Mi"}}) as made:
        yield made


@contextlib.contextmanager
def run_fleet(kubectl: Kubectl, weights: dict[str, Any] | None = None) -> Iterator[SignedRollout]:
    """Run a fleet with these fields of ``spec.weights`` for the length of the block."""
    rollout = stand_in.rollout(NAME, replicas=2, weights=weights)
    rollout["spec"]["security"] = machine_token.security(signatures={"publicKeySecret": KEYS})
    kubectl.apply(stand_in.code())
    kubectl.apply(public_key())
    kubectl.apply(rollout)
    eventually("the rollout is Ready", lambda: ready(kubectl, NAME), within=180, every=1)
    with kubectl.forward(f"svc/{NAME}-router", FRONT_PORT) as url:
        serving(url, 2)
        yield SignedRollout(kubectl, url)
    remove(kubectl, NAME)
    kubectl("delete", "secret", KEYS)


def test_only_signed_pushes_commit(kubectl: Kubectl, signed_fleet: SignedRollout) -> None:
    before = signed_fleet.state()
    assert "accepts signed updates only" in signed_fleet.push("1")["failed"]
    assert signed_fleet.state() == before

    signed = signed_fleet.sign("2")
    assert signed_fleet.push("2", signed) == {"pushed": "2"}
    serving(signed_fleet.url, 2)
    key = json.loads(signed)["key"]

    def signed_by() -> str | None:
        weights = kubectl.get("sglr", NAME)["status"]["weights"]
        return weights["lastUpdate"].get("signedBy") if weights["committedVersion"] == "2" else None

    eventually("the status names the key", lambda: signed_by() == key, within=30)

    before = signed_fleet.state()
    assert "this update becomes version 2/2" in signed_fleet.push("2", signed)["failed"]
    assert signed_fleet.state() == before


def test_only_signed_uploads_are_served_also_after_a_restart(kubectl: Kubectl, staged_fleet: SignedRollout) -> None:
    before = staged_fleet.state()
    with pytest.raises(PushFailed, match="this trainer does not sign"):
        staged_fleet.upload(1, signs=False)
    assert staged_fleet.state() == before

    assert staged_fleet.upload(2)["state"] == "committed"
    found = serving(staged_fleet.url, 2)
    assert (found["committed"]["label"], bool(found["last_update"]["signed_by"])) == ("2", True)
    boots = {member["name"]: member["boot_id"] for member in found["members"]}
    for name in boots:
        kubectl.exec(f"{name}-0", "sh", "-c", KILL, container="engine")

    def have_loaded_it_again() -> bool:
        members = document(staged_fleet.url)["members"]
        return all(member["gate_open"] and member["boot_id"] != boots[member["name"]] for member in members)

    eventually("the new engines serve the signed version from their copies", have_loaded_it_again, within=180)
    assert document(staged_fleet.url)["committed"]["label"] == "2"
