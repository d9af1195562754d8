"""Sets of names of tensors, small enough for the record. Pure."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from functools import lru_cache

_HASH_BYTES = 4
"""Bytes of the hash of a name. 50,000 names take 267 kB. A missing name is mistaken for another one once in 86,000."""

MAX_STORED_HASHES = 50_000


@lru_cache(maxsize=2 * MAX_STORED_HASHES)
def hash_name(name: str) -> bytes:
    """Return the hash of a name."""
    return hashlib.sha256(name.encode()).digest()[:_HASH_BYTES]


class TensorNames:
    """A set of names. Names are compared by their hashes, because the record has no room for names."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names: dict[bytes, str] = {}
        """Each name by its hash; empty if only an earlier coordinator has seen the name."""
        self._packed: dict[int, str] = {}
        """What :meth:`pack` has returned, by its limit."""
        self.add(names)

    @classmethod
    def unpack(cls, text: str) -> TensorNames:
        """Return the names that :meth:`pack` wrote."""
        raw, found = base64.b64decode(text), cls()
        found._names = {raw[at : at + _HASH_BYTES]: "" for at in range(0, len(raw), _HASH_BYTES)}
        return found

    def pack(self, limit: int = MAX_STORED_HASHES) -> str:
        """Return the hashes as text for the record.

        Cached, because the record is made with every event. At most ``limit`` hashes are stored. They act as a random sample, so an
        incomplete push is still detected.
        """
        if limit not in self._packed:
            stored = sorted(self._names)[:limit]
            self._packed = {limit: base64.b64encode(b"".join(stored)).decode()}
        return self._packed[limit]

    def __len__(self) -> int:
        return len(self._names)

    def __or__(self, other: TensorNames) -> TensorNames:
        return self._make({**self._names, **{key: name or self._names.get(key, "") for key, name in other._names.items()}})

    def __and__(self, other: TensorNames) -> TensorNames:
        return self._make({key: name or other._names[key] for key, name in self._names.items() if key in other._names})

    def __sub__(self, other: TensorNames) -> TensorNames:
        return self._make({key: name for key, name in self._names.items() if key not in other._names})

    @classmethod
    def _make(cls, names: dict[bytes, str]) -> TensorNames:
        found = cls()
        found._names = names
        return found

    def add(self, names: Iterable[str]) -> list[str]:
        """Add names. Returns those that are new."""
        by_hash = {hash_name(name): name for name in names}
        new = [name for key, name in by_hash.items() if key not in self._names]
        self._names |= by_hash
        if new:
            self._packed = {}
        return new

    def first(self) -> str:
        """Return the first name in alphabetical order among those that are known; empty if none is."""
        return min(filter(None, self._names.values()), default="")
