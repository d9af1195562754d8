"""Signed versions: a trainer signs the version that it pushes, and each agent verifies the signature before it acknowledges the version."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated

from pydantic import Field

from sglang_rollout.wire import Message
from sglang_rollout.wire.states import Version

PREFIX = b"sglang-rollout-update-v1\n"
"""First bytes of every signed text, so that a signature for another purpose is never valid here."""
SIGNS_FIELD = "signs_updates"
"""Field of ``/init_weights_update_group`` and ``POST /fleet/updates`` of our client: true if it signs its updates. Engines never receive
it."""
KEY_ID_CHARACTERS = 16
KEY_ID_PATTERN = f"^[0-9a-f]{{{KEY_ID_CHARACTERS}}}$"
MAX_RANKS = 1024

Checksum = Annotated[str, Field(max_length=128)]
TensorSize = Annotated[int, Field(ge=1, le=MAX_RANKS)]


class SignedVersion(Message):
    """A version of one rollout, signed with an Ed25519 key of the trainer."""

    uid: str = Field(min_length=1, max_length=64)
    """``metadata.uid`` of the rollout."""
    run: int = Field(ge=1)
    step: int = Field(ge=0)
    label: str = Field(min_length=1, max_length=256)
    checksums: dict[TensorSize, Annotated[tuple[Checksum, ...], Field(max_length=MAX_RANKS)]] = Field(default_factory=dict, max_length=16)
    """Checksums of the weights, one per rank, by the number of an engine's ranks; empty if the trainer does not sign them."""
    digest: str = Field(default="", pattern="^([0-9a-f]{64})?$")
    """Digest of the complete version, with transport Staged (:func:`sglang_rollout.staging.index.version_digest`); empty if the trainer
    does not sign it."""
    key: str = Field(pattern=KEY_ID_PATTERN)
    """ID of the key: :func:`key_id`."""
    signature: str = Field(max_length=128)
    """Ed25519 signature of :func:`signed_text`, base64."""

    @property
    def version(self) -> Version:
        """The version that is signed."""
        return Version(run=self.run, step=self.step, label=self.label)

    @property
    def text(self) -> bytes:
        """The text that is signed."""
        return signed_text(self.uid, self.version, self.checksums, self.digest)


def signed_text(uid: str, version: Version, checksums: dict[int, tuple[str, ...]], digest: str = "") -> bytes:
    """Return the text that a trainer signs: a prefix, and compact JSON with sorted keys in ASCII.

    Without a digest the text has no such field.
    """
    fields = {**version.model_dump(), "uid": uid, "checksums": {str(size): list(ranks) for size, ranks in checksums.items()}}
    if digest:
        fields["digest"] = digest
    return PREFIX + json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def key_id(public_key: bytes) -> str:
    """Return the ID of a public key in DER (SubjectPublicKeyInfo): the first digits of its SHA-256, as openssl and sha256sum print it."""
    return hashlib.sha256(public_key).hexdigest()[:KEY_ID_CHARACTERS]
