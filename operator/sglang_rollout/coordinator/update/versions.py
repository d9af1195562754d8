"""Versions: their order, and what the coordinator knows about the committed version. Pure.

A version is (run, step) plus the trainer's own label. The step never goes back within a run: a trainer that starts lower (it resumed from
an older checkpoint, or starts a new experiment) opens a new run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sglang_rollout.coordinator.update.completeness import Doubt
from sglang_rollout.coordinator.update.tensor_names import TensorNames
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
    names: TensorNames = field(default_factory=TensorNames)
    """Tensors that this run has committed: what an engine needs that starts from ``model.path``."""
    doubt: Doubt = field(default_factory=Doubt)
    """What engines may hold beside a version."""
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

    @property
    def opens_run(self) -> bool:
        """True if a trainer has asked for a new run that no commit has begun."""
        return self.version is not None and self.next_run > self.version.run

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
