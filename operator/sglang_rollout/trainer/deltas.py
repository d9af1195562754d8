"""What a delta upload knows of the upload before it: the bytes of its pieces, in host memory. Never imports torch."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_rollout.staging.differences import encode
from sglang_rollout.wire.staged import Shard

Place = tuple[int, int]
"""Shard and piece."""


class LastUpload:
    """The bytes of the version that a client uploaded last.

    While an upload is under way, its pieces take the place of those before, so that one version is in memory at any time. So after an
    upload that did not finish, the next one is complete. Threads may replace different pieces at the same time.
    """

    def __init__(self) -> None:
        self._shards: Sequence[Shard] = ()
        self._digest = ""
        self._pieces: dict[Place, tuple[str, bytes]] = {}
        """SHA-256 and bytes of each piece."""
        self._has_base = False

    def find_base(self, shards: Sequence[Shard]) -> str:
        """Return the digest of the version that is in memory; empty if there is none, or if it has other shards."""
        return self._digest if list(self._shards) == list(shards) else ""

    def begin(self, shards: Sequence[Shard], base: str) -> None:
        """Begin an upload. With ``base``, which :meth:`find_base` has returned, its pieces may be sent as differences."""
        self._has_base = bool(base)
        if not base:
            self._pieces.clear()
        self._shards, self._digest = shards, ""

    def replace(self, place: Place, digest: str, data: memoryview) -> bytes | None:
        """Keep a piece of the upload, and return its difference from the same piece before.

        Returns:
            The difference; empty if nothing has changed. None: the whole piece is to be sent.
        """
        known, before = self._pieces.get(place, ("", b""))
        if known == digest:
            return b"" if self._has_base else None
        held = bytes(data)
        self._pieces[place] = (digest, held)
        return encode(before, held) if self._has_base and len(before) == len(held) else None

    def finish(self, digest: str) -> None:
        """Note that the fleet has the upload as a version with this digest."""
        self._digest = digest

    def forget(self) -> None:
        """Free the memory."""
        self._shards, self._digest = (), ""
        self._pieces.clear()
