"""Which tensors make a version: by name, or by a digest of the names where only a record tells. Pure."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from sglang_rollout.wire.record import Tensors


@dataclass(frozen=True)
class TensorSet:
    """The tensors that make a committed version, over what ``model.path`` holds."""

    names: frozenset[str] = frozenset()
    """The names that are known."""
    rest: Tensors | None = None
    """What an earlier coordinator has seen of them: a name that is not in ``names`` may be among these."""

    def plus(self, names: frozenset[str]) -> TensorSet:
        """Return the set with the tensors of one more commit."""
        both = self.names | names
        known = self._stands_for_rest(names) or self._stands_for_rest(both)
        return TensorSet(both, None if known else self.rest)

    def _stands_for_rest(self, names: frozenset[str]) -> bool:
        """Return True if these names account for what an earlier coordinator has seen.

        Equal names prove it. More names are taken for a trainer that trains more tensors now: otherwise no push would ever be complete
        again.
        """
        return self.rest is None or len(names) > self.rest.count or digest_names(names) == self.rest

    @cached_property
    def row(self) -> Tensors | None:
        """Return what the record holds; None if no tensors were sent."""
        return self.rest or (digest_names(self.names) if self.names else None)

    def lacks(self, got: frozenset[str]) -> str:
        """Return why an engine that held something else is incomplete with these tensors, as a phrase; empty if it is complete."""
        missing = sorted(self.names - got)
        if missing:
            return f"{len(missing)} of {len(self.names)} tensors that make a version of this run, the first is {missing[0]}"
        if self.rest is not None and not self._stands_for_rest(got):
            return f"tensors: {self.rest.count} make a version of this run, and the {len(got)} that came are not the same"
        return ""


def digest_names(names: Iterable[str]) -> Tensors:
    """Return what distinguishes a set of names from others."""
    ordered = sorted(names)
    return Tensors(count=len(ordered), digest=hashlib.sha256("\n".join(ordered).encode()).hexdigest())


_HASH_BYTES = 4
"""Bytes of the hash of a name. 50,000 names take 267 kB. A missing name is mistaken for another one once in 86,000."""

_MAX_STORED_HASHES = 50_000


@lru_cache(maxsize=2 * _MAX_STORED_HASHES)
def hash_name(name: str) -> bytes:
    """Return the hash of a name, for the record, which has no room for names."""
    return hashlib.sha256(name.encode()).digest()[:_HASH_BYTES]


@lru_cache(maxsize=1)
def pack_hashes(names: frozenset[str], but: frozenset[str] = frozenset(), marks: frozenset[bytes] = frozenset()) -> str:
    """Return the hashes of ``names`` without ``but``, and other hashes, as text for the record.

    Cached, because the record is made with every event. At most 50,000 hashes are stored. They act as a random sample, so an incomplete
    push is still detected.
    """
    return base64.b64encode(b"".join(sorted({*marks, *map(hash_name, names - but)})[:_MAX_STORED_HASHES])).decode()


def unpack_hashes(text: str) -> frozenset[bytes]:
    """Return the hashes that :func:`pack_hashes` wrote."""
    raw = base64.b64decode(text)
    return frozenset(raw[at : at + _HASH_BYTES] for at in range(0, len(raw), _HASH_BYTES))


def tensors_of_record(tensors: Tensors | None) -> TensorSet:
    """Return the tensors that a record describes. A record of an earlier release describes none."""
    return TensorSet(rest=tensors)
