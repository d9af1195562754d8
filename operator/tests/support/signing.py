"""Keys of trainers, and versions signed with them."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat, load_pem_private_key

from sglang_rollout.trainer.signing import SigningKey
from sglang_rollout.wire.signed import SignedVersion
from sglang_rollout.wire.states import Version
from sglang_rollout.wire.trainer import Signing

UID = "11111111-1111-1111-1111-111111111111"


def make_pem() -> bytes:
    """Return a new private key."""
    return Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def public_pem(pem: bytes) -> bytes:
    """Return the public key of a private key."""
    return load_pem_private_key(pem, None).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def write_public_keys(folder: Path, *pems: bytes) -> None:
    """Write the public keys of private keys, as a mounted Secret has them."""
    folder.mkdir(exist_ok=True)
    for index, pem in enumerate(pems):
        (folder / f"{index}.pem").write_bytes(public_pem(pem))


def sign(
    pem: bytes, version: Version, uid: str = UID, checksums: dict[int, tuple[str, ...]] | None = None, digest: str = ""
) -> SignedVersion:
    """Return a version as a trainer with this private key signs it."""
    return SigningKey(pem).sign(Signing(uid=uid, version=version), version.label, checksums or {}, digest)
