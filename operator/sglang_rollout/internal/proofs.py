"""Prove calls between the fleet's processes with a credential that never travels.

Code in an engine's container can take the port of its gate, so a caller cannot know who listens there. A *proof* is an HMAC with the
credential of the called process. A call's proof covers everything that the call does, and a *challenge* of the called process, which takes
each proof once. An answer's proof covers the answer and the call. So a listener without the credential learns nothing that it could use,
and the caller notices it before it reads the answer. Pure but for the random numbers.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from sglang_rollout.credentials import Credentials
from sglang_rollout.wire.ports import DEADLINE_HEADER, TERM_HEADER

PROOF_HEADER = "X-Rollout-Proof"
"""Header of a call and of its answer."""
CHALLENGE_HEADER = "X-Rollout-Challenge"
"""Reply header: the challenge for the next call."""
CHALLENGE_SECONDS = 60.0
"""Age at which a new challenge replaces another. The replaced one is accepted for as long, because calls with it are under way."""
_RANDOM_BYTES = 16
"""128 bits cannot be guessed, and never repeat."""
_CALL, _ANSWER = b"call", b"answer"
"""The direction is part of each proof, so that no call can be sent back as an answer."""


def digest(body: bytes) -> str:
    """Return the SHA-256 of a body, hexadecimal."""
    return hashlib.sha256(body).hexdigest()


@dataclass(frozen=True)
class Call:
    """What a call's proof covers."""

    method: str
    path: str
    """Path with query, as it is sent."""
    headers: Mapping[str, str]
    """Headers of the call, of which the term and the deadline are covered."""
    body_digest: str

    def _parts(self, challenge: str, nonce: str) -> tuple[str, ...]:
        covered = (self.headers.get(TERM_HEADER, ""), self.headers.get(DEADLINE_HEADER, ""))
        return (challenge, nonce, self.method, self.path, *covered, self.body_digest)

    def prove(self, credentials: Credentials, challenge: str) -> CallProof:
        """Return the proof of this call, with the first of the credentials."""
        nonce, key = secrets.token_hex(_RANDOM_BYTES), credentials.sent
        return CallProof(challenge, nonce, self.body_digest, _mac(key, _CALL, *self._parts(challenge, nonce)), key)

    def check(self, proof: CallProof, credentials: Credentials) -> CallProof | None:
        """Return the proof with the credential that it was made with; None if it was made with another one, or for another call."""
        for key in credentials.lines():
            if hmac.compare_digest(_mac(key, _CALL, *self._parts(proof.challenge, proof.nonce)), proof.mac):
                return CallProof(proof.challenge, proof.nonce, proof.body_digest, proof.mac, key)
        return None


@dataclass(frozen=True)
class CallProof:
    """Proof of a call."""

    challenge: str
    """Challenge of the called process that the caller knows; empty if it knows none."""
    nonce: str
    body_digest: str
    mac: str
    key: str = ""
    """The credential; empty if it is not known yet."""

    @property
    def header(self) -> str:
        """The header's value."""
        return f"{self.challenge}.{self.nonce}.{self.body_digest}.{self.mac}"

    @classmethod
    def parse(cls, text: str) -> CallProof | None:
        """Return the proof in a header; None if the header holds none."""
        parts = text.split(".")
        return cls(*parts) if len(parts) == 4 and text.isascii() else None

    def prove_answer(self, status: int, term: str, body_digest: str) -> str:
        """Return the header of an answer to this call.

        Args:
            status: HTTP status.
            term: Value of the term's header; empty if the answer has none.
            body_digest: SHA-256 of the body.
        """
        return f"{body_digest}.{_mac(self.key, _ANSWER, self.mac, str(status), term, body_digest)}"

    def check_answer(self, text: str, status: int, term: str) -> str | None:
        """Return the SHA-256 that the body of an answer must have; None if the header does not prove the answer."""
        body_digest, _, _ = text.partition(".")
        wanted = self.prove_answer(status, term, body_digest)
        return body_digest if text.isascii() and hmac.compare_digest(wanted, text) else None


class Challenges:
    """Challenges of one process. A challenge ends with the process, so no call outlives it."""

    def __init__(self) -> None:
        self._since = 0.0
        self._used: dict[str, set[str]] = {}
        """Proofs that were accepted, by challenge: the replaced one, and the current one, which is the last."""

    def current(self, now: float) -> str:
        """Return the challenge for new calls at time ``now``, in seconds."""
        if not self._used or now - self._since >= CHALLENGE_SECONDS:
            replaced = next(reversed(self._used), None) if now - self._since < 2 * CHALLENGE_SECONDS else None
            kept = {replaced: self._used[replaced]} if replaced is not None else {}
            self._used = kept | {secrets.token_hex(_RANDOM_BYTES): set()}
            self._since = now
        return next(reversed(self._used))

    def is_known(self, challenge: str, now: float) -> bool:
        """Return whether a call with this challenge may be accepted at time ``now``."""
        self.current(now)
        return challenge in self._used

    def take(self, proof: CallProof) -> bool:
        """Record a call that is to be accepted. Return False if it was accepted before, or if its challenge has ended meanwhile."""
        used = self._used.get(proof.challenge)
        if used is None or proof.mac in used:
            return False
        used.add(proof.mac)
        return True


def _mac(key: str, *parts: bytes | str) -> str:
    # No part contains a line break, because each comes from one line of a request, so the text has one meaning.
    text = b"\n".join(part if isinstance(part, bytes) else part.encode("utf-8", "surrogateescape") for part in parts)
    return hmac.new(key.encode(), text, "sha256").hexdigest()
