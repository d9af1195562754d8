"""Signatures of weight updates, for fleets with ``security.signatures``. Needs the package ``cryptography`` only if a key is given."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_rollout.trainer.errors import FleetError
from sglang_rollout.wire.signed import SignedVersion, key_id, signed_text
from sglang_rollout.wire.trainer import Signing

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SIGNING_KEY_VARIABLE = "SGLANG_ROLLOUT_SIGNING_KEY"


class SigningKey:
    """Ed25519 private key of a trainer.

    Args:
        pem: The key in PEM, without a password.

    Raises:
        FleetError: The key cannot be used.
    """

    def __init__(self, pem: bytes) -> None:
        self._key = _load(pem)
        self.id = key_id(_public_der(self._key))
        """ID of the key, as ``status.weights.lastUpdate.signedBy`` shows it."""

    def sign(self, signing: Signing, label: str, checksums: dict[int, tuple[str, ...]], digest: str = "") -> SignedVersion:
        """Return the next version, signed.

        Args:
            signing: What the fleet says the signature must name.
            label: Label of the push.
            checksums: Checksums of the weights by the number of an engine's ranks; empty if they are not known.
            digest: Digest of the complete version, for an upload; empty if it is not known.

        Raises:
            FleetError: The fleet names a version with another label.
        """
        version = signing.version
        if version.label != label:
            raise FleetError(f"The fleet asks for a signature of version {version} with the label {version.label!r}, not {label!r}.")
        signature = base64.b64encode(self._key.sign(signed_text(signing.uid, version, checksums, digest))).decode()
        fields = version.model_dump()
        return SignedVersion(uid=signing.uid, **fields, checksums=checksums, digest=digest, key=self.id, signature=signature)


def find_signing_key(given: str | os.PathLike[str] | bytes | None) -> SigningKey | None:
    """Return the key of the argument, or else of the environment; None if neither names one.

    Raises:
        FleetError: The key cannot be read or used.
    """
    given = given if given is not None else os.environ.get(SIGNING_KEY_VARIABLE) or None
    if given is None:
        return None
    if isinstance(given, bytes):
        return SigningKey(given)
    try:
        return SigningKey(Path(given).read_bytes())
    except OSError as error:
        raise FleetError(f"The signing key {os.fspath(given)} cannot be read: {error}.") from error


def _load(pem: bytes) -> Ed25519PrivateKey:
    try:
        from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415 - an extra: most trainers sign nothing
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415
        from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415
    except ImportError as error:
        raise FleetError("Signing needs the package cryptography: pip install 'sglang-rollout[signing]'.") from error
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise FleetError(f"The signing key is no private key in PEM without a password: {error}.") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise FleetError("The signing key is no Ed25519 key. Make one with: openssl genpkey -algorithm ed25519 -out signing-key.pem")
    return key


def _public_der(key: Ed25519PrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat  # noqa: PLC0415

    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
