"""Tokens of ServiceAccounts, and the keys that verify them, as an API server issues them."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from sglang_rollout.coordinator.callers.keys import KeySet, SigningKeys, parse_keys
from sglang_rollout.kube.errors import ApiUnavailable

ISSUER = "https://kubernetes.default.svc"
AUDIENCE = "rollout.sglang.io/ml/fleet"


@dataclass(frozen=True)
class Key:
    """A private key of an API server."""

    key_id: str
    algorithm: str
    private: Any

    @property
    def published(self) -> dict[str, Any]:
        kind = RSAAlgorithm if self.algorithm == "RS256" else ECAlgorithm
        public: Any = kind.to_jwk(self.private.public_key(), as_dict=True)
        return {**public, "kid": self.key_id, "alg": self.algorithm, "use": "sig"}


@cache
def make_key(key_id: str, algorithm: str = "ES256") -> Key:
    if algorithm == "RS256":
        return Key(key_id, algorithm, rsa.generate_private_key(public_exponent=65537, key_size=2048))
    return Key(key_id, algorithm, ec.generate_private_key(ec.SECP256R1()))


def make_claims(*, pod: str | None = "ml-train-0", account: str = "ml:trainer", audience: str = AUDIENCE, **more: Any) -> dict[str, Any]:
    """Return the claims of a token. ``pod`` is the UID of the pod that the token is bound to."""
    namespace, _, name = account.partition(":")
    bound: dict[str, Any] = {"namespace": namespace, "serviceaccount": {"name": name, "uid": "s"}}
    if pod is not None:
        bound["pod"] = {"name": "train-0", "uid": pod}
    now = int(time.time())
    times = {"iat": now, "nbf": now, "exp": now + 3600}
    return {"aud": [audience], "iss": ISSUER, "sub": f"system:serviceaccount:{account}", **times, "kubernetes.io": bound, **more}


def sign(key: Key, claims: dict[str, Any] | None = None, **more: Any) -> str:
    payload = json.dumps(claims if claims is not None else make_claims(**more)).encode()
    # jwt.encode refuses claims of wrong types, which the coordinator must refuse, too.
    return jwt.PyJWS().encode(payload, key.private, algorithm=key.algorithm, headers={"kid": key.key_id, "typ": "JWT"})


@dataclass
class ApiServer:
    """Publishes keys, and counts how often they are read."""

    keys: list[Key] = field(default_factory=list)
    is_away: bool = False
    loads: int = 0

    async def load(self) -> KeySet:
        self.loads += 1
        if self.is_away:
            raise ApiUnavailable("the API server is away")
        return KeySet(ISSUER, parse_keys({"keys": [key.published for key in self.keys]}))

    def signing_keys(self) -> SigningKeys:
        return SigningKeys(self.load)
