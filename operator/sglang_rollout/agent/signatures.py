"""Signatures of versions: the public keys of trainers, and the check before an engine acknowledges a version."""

from __future__ import annotations

import base64
import logging
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

from sglang_rollout.agent.state import EngineRecord, version_identity
from sglang_rollout.wire.agent import AckRequest
from sglang_rollout.wire.reasons import Refusal, RefusalCode
from sglang_rollout.wire.signed import SignedVersion, key_id

log = logging.getLogger(__name__)

_SUFFIX = "*.pem"


class PublicKeys:
    """Public keys in the files ``*.pem`` of a folder, read again when a file changes, as the kubelet changes the files of a Secret."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamp: tuple[tuple[str, int, int, int], ...] | None = None
        self._keys: dict[str, Ed25519PublicKey] = {}

    def current(self) -> dict[str, Ed25519PublicKey]:
        """Return the keys by their IDs. A file that is no Ed25519 public key is left out, with a warning in the log."""
        try:
            files = sorted(self._folder.glob(_SUFFIX))
            stamp = tuple((file.name, (found := file.stat()).st_mtime_ns, found.st_ino, found.st_size) for file in files)
            if stamp != self._stamp:
                self._keys = dict(pair for file in files if (pair := _read_key(file)) is not None)
                self._stamp = stamp
        except OSError as error:
            log.warning("The public keys in %s cannot be read; the last ones stay in effect: %s.", self._folder, error)
        return self._keys


def _read_key(file: Path) -> tuple[str, Ed25519PublicKey] | None:
    """Return ID and key of a file; None if it holds no Ed25519 public key. Raises OSError."""
    data = file.read_bytes()
    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        log.warning("%s is no public key in PEM and is ignored: %s.", file, error)
        return None
    if not isinstance(key, Ed25519PublicKey):
        log.warning("%s is no Ed25519 key and is ignored.", file)
        return None
    return key_id(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)), key


class Signatures:
    """Decides which versions an engine may acknowledge.

    Args:
        keys: Public keys of the trainers.
        uid: ``metadata.uid`` of the rollout.
        require_checksums: True: a signature must contain the checksums of the weights, or the digest of the version.
    """

    def __init__(self, keys: PublicKeys, uid: str, *, require_checksums: bool = False) -> None:
        self._keys = keys
        self._uid = uid
        self._require_checksums = require_checksums

    def ack_refusal(self, request: AckRequest, record: EngineRecord, tensor_size: int | None) -> Refusal | None:
        """Return why an engine must not acknowledge a version; None if it may."""
        version, signed = request.version, request.signed
        if version.is_base:
            # model.path needs no signature, but only an engine that has received no weights is known to hold it.
            return _forbidden("The engine has received weights, and only signed versions are accepted.") if record.written else None
        if signed is None:
            return _forbidden(f"Version {version} is not signed, and this engine accepts signed versions only.")
        if signed.version != version:
            return _forbidden(
                f"The signature is for version {signed.version} (label {signed.label}), not {version} (label {version.label})."
            )
        return self.refusal(signed, record, tensor_size)

    @staticmethod
    def digest_refusal(signed: SignedVersion | None, digest: str) -> Refusal | None:
        """Return why an engine must not hold the contents of a copy; None if the trainer has signed them, or signed no digest.

        Args:
            signed: The signed version; None: the weights of ``model.path``, which come from no copy.
            digest: Digest of the copy that the engine loads; empty: its weights came another way.
        """
        if signed is None:
            return _forbidden("The copy has no signature, and this engine loads signed versions only.") if digest else None
        if signed.digest in ("", digest):
            return None
        wanted = f"The trainer signed version {signed.version} with the digest {signed.digest[:12]}…"
        if not digest:
            return _forbidden(f"{wanted}, and the engine has not loaded a copy with this digest.")
        return _forbidden(f"{wanted}, and the pod's copy has the digest {digest[:12]}….")

    def refusal(self, signed: SignedVersion, record: EngineRecord, tensor_size: int | None) -> Refusal | None:
        """Return why the engine does not accept a signed version; None if it does.

        Args:
            signed: The signed version.
            record: Record of the engine.
            tensor_size: Ranks of the engine; None: not known.
        """
        if signed.uid != self._uid:
            return _forbidden(f"The signature is for another rollout: {signed.uid}, not {self._uid}.")
        newest = record.newest_served
        if newest is not None and version_identity(signed.version) < version_identity(newest):
            return _forbidden(f"Version {signed.version} is older than version {newest}, which the engine has served.")
        if self._require_checksums and not signed.digest and tensor_size not in signed.checksums:
            return _forbidden(
                f"The signature has no digest, and no checksums for an engine with tensor parallel size {tensor_size}"
                " (security.signatures.requireChecksums): upload the version (weights.transport Staged), or push with checksums."
            )
        return self._signature_refusal(signed)

    def _signature_refusal(self, signed: SignedVersion) -> Refusal | None:
        keys = self._keys.current()
        key = keys.get(signed.key)
        if key is None:
            known = f"the keys are {', '.join(sorted(keys))}" if keys else "the Secret of security.signatures has no key"
            return _forbidden(f"The key {signed.key} is not known: {known}.")
        try:
            key.verify(base64.b64decode(signed.signature, validate=True), signed.text)
        except (ValueError, InvalidSignature):
            return _forbidden(f"The signature of version {signed.version} (label {signed.label}) is not valid.")
        return None


def _forbidden(message: str) -> Refusal:
    return Refusal(RefusalCode.FORBIDDEN, message)
