"""Versions: their order, the tensors of a complete push, and what the coordinator knows about the committed version. Pure.

A version is (run, step) plus the trainer's own label. The step never goes back within a run: a trainer that starts lower (it resumed from
an older checkpoint, or starts a new experiment) opens a new run.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from sglang_rollout.wire.record import EngineChecksums, OnDisk
from sglang_rollout.wire.states import StagedVersion, Version

HIGHEST_STEP = 10**15
"""Above this a number is taken for a name (a hash, nanoseconds): the fleet then counts the step."""


def order_key(version: Version) -> tuple[int, int]:
    """Return the sort key of a version."""
    return (version.run, version.step)


def newest(*versions: Version | None) -> Version | None:
    """Return the highest of the versions that are known."""
    known = [version for version in versions if version is not None]
    return max(known, key=order_key) if known else None


def next_version(committed: Version, label: str | None, reserved: Version | None = None, next_run: int = 0) -> Version:
    """Return the version that an update with this label becomes.

    Args:
        committed: The committed version.
        label: The trainer's label; None, or a label that is no number: the fleet counts.
        reserved: Highest version of an update that failed after an engine had acknowledged it. That engine still says that it holds
            (run, step), so the pair must never name other weights.
        next_run: The run that a trainer asked for.
    """
    last = newest(committed, reserved) or committed
    number = _number(label)
    if next_run > last.run:
        run, step = next_run, 1 if number is None else number
    elif number is None:
        # No label, or one that is no number: the fleet counts.
        run, step = (1, 1) if last.is_base else (last.run, last.step + 1)
    elif last.is_base or number <= last.step:
        run, step = last.run + 1, number
    else:
        run, step = last.run, number
    return Version(run=run, step=step, label=label if label is not None else str(step))


def history(before: list[Version], committed: Version, keep: int) -> list[Version]:
    """Return the versions that may be served after a commit, oldest first: ``keep`` older ones and the committed one.

    Versions of another run belong to another experiment. Only base, from which the first run begins, is comparable.
    """
    comparable = [version for version in before if order_key(version) < order_key(committed) and (version.run in (0, committed.run))]
    if committed.run > 1:
        comparable = [version for version in comparable if not version.is_base]
    older = sorted(comparable, key=order_key)
    return [*(older[-keep:] if keep else []), committed]


def _number(label: str | None) -> int | None:
    if label is None or len(label) > 16 or not (label.isascii() and label.isdigit()):
        return None
    number = int(label)
    return number if number <= HIGHEST_STEP else None


_HASH_BYTES = 4
"""Bytes of the hash of a name. 50,000 names take 267 kB. A missing name is mistaken for another one once in 86,000."""

MAX_STORED_HASHES = 50_000


@lru_cache(maxsize=2 * MAX_STORED_HASHES)
def hash_name(name: str) -> bytes:
    """Return the hash of a name."""
    return hashlib.sha256(name.encode()).digest()[:_HASH_BYTES]


class AnnouncedTensors:
    """The tensors that a complete push brings: all that the updates of one run have announced.

    Names are compared by their hashes, because the record has no room for names.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names: dict[bytes, str] = {}
        """Each name by its hash; empty if only an earlier coordinator has seen the name."""
        self._packed: str | None = None
        self.add(names)

    @classmethod
    def unpack(cls, text: str) -> AnnouncedTensors:
        """Return the tensors that :meth:`pack` wrote."""
        raw, found = base64.b64decode(text), cls()
        found._names = {raw[at : at + _HASH_BYTES]: "" for at in range(0, len(raw), _HASH_BYTES)}
        return found

    def pack(self) -> str:
        """Return the hashes as text for the record.

        Cached, because the record is made with every event. At most 50,000 hashes are stored. They act as a random sample, so an
        incomplete push is still detected.
        """
        if self._packed is None:
            stored = sorted(self._names)[:MAX_STORED_HASHES]
            self._packed = base64.b64encode(b"".join(stored)).decode()
        return self._packed

    def add(self, names: Iterable[str]) -> list[str]:
        """Add names. Returns those that are new."""
        by_hash = {hash_name(name): name for name in names}
        new = [name for key, name in by_hash.items() if key not in self._names]
        self._names |= by_hash
        if new:
            self._packed = None
        return new

    def remove(self, names: Iterable[str]) -> None:
        """Remove names."""
        for name in names:
            self._names.pop(hash_name(name), None)
        self._packed = None

    def missing_from(self, sent: Iterable[str]) -> str:
        """Return which tensors a push of these names lacks, as a phrase; empty if the push is complete."""
        missing = self._names.keys() - set(map(hash_name, sent))
        if not missing:
            return ""
        known = sorted(filter(None, map(self._names.get, missing)))
        first = f", the first is {known[0]}" if known else ""
        return f"{len(missing)} of {len(self._names)} tensors of a complete push{first}"


@dataclass
class Committed:
    """The committed version, what makes it, and which versions may follow."""

    version: Version | None = None
    """None until a restarted coordinator has proved what is committed."""
    author: str = ""
    """Caller that pushed the version; empty: not known, or no caller did."""
    history: list[Version] = field(default_factory=list)
    """Versions that may be served, oldest first; the committed one is the last."""
    checksums: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Checksums of the committed version by the number of an engine's ranks, as far as they are known."""
    engine_checksums: dict[str, EngineChecksums] = field(default_factory=dict)
    """Checksums of each engine, on a fleet that keeps the weights it was started with."""
    disk: OnDisk | None = None
    """Where the committed version was loaded from; None: it came from a trainer."""
    staged: StagedVersion | None = None
    """Contents of the committed version; None: it did not come through the weight store, or they are not known."""
    load_seconds: float | None = None
    """Seconds that an engine last took to load a staged version; None: not known."""
    announced: AnnouncedTensors = field(default_factory=AnnouncedTensors)
    """Tensors that an engine needs unless it holds the committed version."""
    groups: frozenset[str] = frozenset()
    """Process groups that sent the last committed tensors: the stages of one trainer, if there are several."""
    reserved: Version | None = None
    """Highest version that an engine acknowledged and that was not committed. Its number never names other weights."""
    next_run: int = 0
    """The run that the next update opens, if a trainer asked for a new one."""
    fleet_id: str = ""
    """Distinguishes the versions of this fleet from those of a fleet that had the same name."""
    commits: int = 0
    """Updates that this coordinator has committed."""

    def commit(self, version: Version, author: str, max_staleness: int) -> None:
        """Make this the committed version, and tolerate as many older ones as the policy allows."""
        before = self.history or ([self.version] if self.version is not None else [])
        if version != self.version:
            self.checksums, self.disk, self.staged = {}, None, None
        self.history = history(before, version, max_staleness)
        self.version, self.author = version, author

    def reserve(self, versions: Iterable[Version | None]) -> None:
        """Never use these versions for other weights."""
        self.reserved = newest(self.reserved, *versions)

    def next_version(self, label: str | None) -> Version:
        """Return the version that an update with this label becomes if it commits."""
        if self.version is None:
            raise RuntimeError("no update can be open before the committed version is proved")
        return next_version(self.version, label, self.reserved, self.next_run)
