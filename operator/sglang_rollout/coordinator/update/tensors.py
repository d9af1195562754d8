"""Which tensors make a version, by name or, where only a record tells of them, by a digest of their names. Pure."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from sglang_rollout.wire.record import Tensors


@dataclass(frozen=True)
class Brought:
    """The tensors that make a committed version, over what ``model.path`` holds."""

    names: frozenset[str] = frozenset()
    """As far as they are known by name."""
    rest: Tensors | None = None
    """What a coordinator before this one has seen of them: a name that is not in ``names`` may be among these."""

    def plus(self, names: frozenset[str]) -> Brought:
        """With those of one more commit."""
        both = self.names | names
        known = self._stands_for_rest(names) or self._stands_for_rest(both)
        return Brought(both, None if known else self.rest)

    def _stands_for_rest(self, names: frozenset[str]) -> bool:
        """Equal names prove it. More names than there were are taken for a trainer that trains more by now: else no push would ever be
        complete again."""
        return self.rest is None or len(names) > self.rest.count or digest(names) == self.rest

    @cached_property
    def row(self) -> Tensors | None:
        """For the record; None: nothing was brought."""
        return self.rest or (digest(self.names) if self.names else None)

    def lacks(self, got: frozenset[str]) -> str:
        """Why an engine that held something else is not whole with these tensors, as a phrase; empty if it is."""
        missing = sorted(self.names - got)
        if missing:
            return f"{len(missing)} of {len(self.names)} tensors that make a version of this run, the first is {missing[0]}"
        if self.rest is not None and not self._stands_for_rest(got):
            return f"tensors: {self.rest.count} make a version of this run, and the {len(got)} that came are not the same"
        return ""


def digest(names: Iterable[str]) -> Tensors:
    """What tells a set of names from others."""
    ordered = sorted(names)
    return Tensors(count=len(ordered), digest=hashlib.sha256("\n".join(ordered).encode()).hexdigest())


_MARK = 4
"""Bytes of a name's digest that stand for it. Of 50,000 names 267 kB remain; one that is missing is taken for another once in 86,000."""

_MOST_MARKS = 50_000


@lru_cache(maxsize=2 * _MOST_MARKS)
def mark(name: str) -> bytes:
    """What stands for a name where there is no room for names."""
    return hashlib.sha256(name.encode()).digest()[:_MARK]


@lru_cache(maxsize=1)
def packed(names: frozenset[str], but: frozenset[str] = frozenset(), marks: frozenset[bytes] = frozenset()) -> str:
    """Marks of names, ``but`` for these, and others, as text for the record, which is made with every event: they seldom change.

    Of more than there is room for, these are as good as drawn by lot: an update that lacks some of the names shows all the same.
    """
    return base64.b64encode(b"".join(sorted({*marks, *map(mark, names - but)})[:_MOST_MARKS])).decode()


def unpacked(text: str) -> frozenset[bytes]:
    """The marks that :func:`packed` wrote."""
    raw = base64.b64decode(text)
    return frozenset(raw[at : at + _MARK] for at in range(0, len(raw), _MARK))


def recalled(tensors: Tensors | None) -> Brought:
    """What a record says; a record of a release before says nothing."""
    return Brought(rest=tensors)
