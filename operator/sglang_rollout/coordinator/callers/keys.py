"""The API server's public keys, with which the coordinator verifies tokens of ServiceAccounts. Loads them, and calls nothing else."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jwt

from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import KubeError

log = logging.getLogger(__name__)

ALGORITHMS = frozenset({"ES256", "ES384", "ES512", "RS256"})
"""Algorithms of the API server's signatures. A key is used with its own algorithm only, whatever a token names."""
REFRESH_SECONDS = 300.0
"""Interval of loads. A key that the API server no longer publishes is then forgotten."""
RELOAD_SECONDS = 10.0
"""Shortest time between two loads, so that callers with invented keys cannot flood the API server."""
LOAD_SECONDS = 3.0
"""Longest wait for a load."""

_DISCOVERY_PATH = "/.well-known/openid-configuration"
_KEYS_PATH = "/openid/v1/jwks"


@dataclass(frozen=True)
class KeySet:
    """What the API server publishes."""

    issuer: str = ""
    keys: Mapping[str, jwt.PyJWK] = field(default_factory=dict)
    """Keys by their ID."""


async def load_keys(kube: Kube) -> KeySet:
    """Read issuer and keys from the API server.

    Raises:
        KubeError: The API server does not answer, or refuses the answer.
    """
    discovery = await kube.get_path(_DISCOVERY_PATH)
    published = await kube.get_path(_KEYS_PATH)
    return KeySet(str(discovery.get("issuer") or ""), parse_keys(published))


def parse_keys(published: Mapping[str, Any]) -> dict[str, jwt.PyJWK]:
    """Return the usable keys of a JSON Web Key Set by their ID. Keys of other algorithms are left out."""
    keys = {}
    for item in published.get("keys") or []:
        try:
            key = jwt.PyJWK(item)
        except jwt.PyJWTError as error:
            log.warning("a key of the API server cannot be used: %s", error)
            continue
        if key.key_id is not None and key.algorithm_name in ALGORITHMS:
            keys[key.key_id] = key
    return keys


class SigningKeys:
    """Caches the keys. Known keys stay valid while the API server is away."""

    def __init__(self, load: Callable[[], Awaitable[KeySet]]) -> None:
        self._load = load
        self._current = KeySet()
        self._loading: asyncio.Task[None] | None = None
        self._loaded_at = -math.inf
        self.problem = ""
        """Why the last load failed; empty if it succeeded."""

    @property
    def issuer(self) -> str:
        """Issuer of the API server's tokens."""
        return self._current.issuer

    async def find(self, key_id: str) -> jwt.PyJWK | None:
        """Return a key. If it is unknown, load the keys again, at most every ``RELOAD_SECONDS``."""
        if key_id not in self._current.keys:
            await self._reload()
        return self._current.keys.get(key_id)

    async def run(self) -> None:
        """Load the keys again and again, forever."""
        while True:
            await self._reload()
            await asyncio.sleep(RELOAD_SECONDS if self.problem else REFRESH_SECONDS)

    async def _reload(self) -> None:
        """Load the keys, or wait for the load that runs. Do nothing directly after a load."""
        now = asyncio.get_running_loop().time()
        if self._loading is None or self._loading.done():
            if now - self._loaded_at < RELOAD_SECONDS:
                return
            self._loaded_at = now
            self._loading = asyncio.create_task(self._load_once(), name="keys of the API server")
        await asyncio.shield(self._loading)

    async def _load_once(self) -> None:
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                self._current = await self._load()
            self.problem = ""
        except (KubeError, TimeoutError) as error:
            reason = str(error) or f"no answer within {LOAD_SECONDS:g} s"
            if not self.problem:
                log.warning("the keys of the API server cannot be read, so that only tokens with known keys are accepted: %s", reason)
            self.problem = reason
