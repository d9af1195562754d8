"""Tokens that callers send: ``Authorization: Bearer TOKEN``."""

from __future__ import annotations

import hmac
import logging
import os
from pathlib import Path
from typing import Any

import jwt

from sglang_rollout.coordinator.callers.keys import SigningKeys
from sglang_rollout.coordinator.callers.policy import AccountToken, BadToken, Credential, StaticToken

log = logging.getLogger(__name__)

LEEWAY_SECONDS = 60
"""Difference of clocks that the API server accepts, too."""

_CLAIMS = ("exp", "nbf", "iss", "aud", "sub")
_SUBJECT = "system:serviceaccount:"
_KUBERNETES = "kubernetes.io"
_UNBOUND_CLAIMS = frozenset({"namespace", "serviceaccount", "warnafter"})
"""Claims of a token that is bound to no object. Other claims may name an object whose end the coordinator does not notice."""
_CLAIMS_OF_PODS = _UNBOUND_CLAIMS | {"pod", "node"}
"""Claims of a token that is bound to a pod. Since Kubernetes 1.30 it names the pod's node."""


class TokenFile:
    """A token in a file, read again when the file changes, as the kubelet changes the file of a Secret."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._token = b""

    def read(self) -> bytes:
        """Return the token; empty if there is none now."""
        try:
            found = os.stat(self._path)
            stamp = (found.st_mtime_ns, found.st_ino, found.st_size)
            if stamp != self._stamp:
                self._token = self._path.read_bytes().strip()
                self._stamp = stamp
        except OSError as error:
            if self._token:
                log.warning("the token %s cannot be read, so that no caller has it: %s", self._path, error.strerror)
            self._token, self._stamp = b"", None
        return self._token


def bearer_token(header: str | None) -> str | None:
    """Return the token of an ``Authorization`` header; None if it has none."""
    scheme, _, token = (header or "").strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def is_token(given: str, expected: bytes) -> bool:
    """Compare tokens in constant time. No token equals an empty one."""
    # Bytes that are not ASCII arrive as lone surrogates.
    return bool(expected) and hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected)


async def check_token(header: str | None, static: bytes, *, keys: SigningKeys | None = None, audience: str = "") -> Credential:
    """Return what the header of a call proves.

    Args:
        header: ``Authorization``.
        static: Token of ``security.token.secretName``; empty: there is none.
        keys: Keys of the API server; None: tokens of ServiceAccounts are not accepted.
        audience: Audience of tokens of ServiceAccounts.
    """
    given = bearer_token(header)
    if given is None:
        return None
    if is_token(given, static):
        return StaticToken()
    if keys is not None and given.count(".") == 2 and given.isascii():
        return await read_account_token(given, keys, audience)
    return BadToken("it is not the token of security.token.secretName" if static else "this rollout has no token")


async def read_account_token(token: str, keys: SigningKeys, audience: str) -> AccountToken | BadToken:
    """Verify the token of a ServiceAccount. Return its identity, or why it is not accepted."""
    try:
        header = jwt.get_unverified_header(token)
    except jwt.PyJWTError:
        return BadToken("it is no JSON Web Token")
    key_id = header.get("kid")
    key = await keys.find(key_id) if isinstance(key_id, str) else None
    if key is None:
        return BadToken(f"the API server publishes no such key{f' ({keys.problem})' if keys.problem else ''}")
    try:
        claims = jwt.decode(
            token,
            key,
            algorithms=[key.algorithm_name],
            audience=audience,
            issuer=keys.issuer,
            leeway=LEEWAY_SECONDS,
            options={"require": list(_CLAIMS)},
        )
    except jwt.PyJWTError as error:
        return BadToken(_describe_error(error, audience))
    return _parse_claims(claims)


def _describe_error(error: jwt.PyJWTError, audience: str) -> str:
    """Return why a token is not accepted, as the end of a sentence."""
    match error:
        case jwt.ExpiredSignatureError():
            return "it has expired"
        case jwt.ImmatureSignatureError():
            return "it is not valid yet"
        case jwt.InvalidAudienceError():
            return f"its audience is not {audience}"
        case _:
            return f"it is not valid: {error}"


def _parse_claims(claims: dict[str, Any]) -> AccountToken | BadToken:
    """Return the identity of verified claims."""
    namespace, _, name = str(claims["sub"]).removeprefix(_SUBJECT).partition(":")
    bound = claims.get(_KUBERNETES)
    if not str(claims["sub"]).startswith(_SUBJECT) or not name or not isinstance(bound, dict):
        return BadToken("it belongs to no ServiceAccount")
    pod = bound.get("pod")
    is_bound_to_pod = isinstance(pod, dict) and bool(pod.get("uid"))
    if bound.keys() - (_CLAIMS_OF_PODS if is_bound_to_pod else _UNBOUND_CLAIMS):
        return BadToken("it is bound to an object that is no pod")
    return AccountToken(namespace, name, pod_uid=str(pod["uid"]) if isinstance(pod, dict) else None)
