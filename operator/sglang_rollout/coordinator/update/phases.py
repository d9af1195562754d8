"""The weight update: its phases, the one table of legal transitions, the open update, and how updates ended. Pure.

Between two operations the fleet rests in IDLE, PAUSE (a trainer paused it, or was lost) or in TRANSFER or STAGE (an update is open).

```
  IDLE ──► PAUSE ──► OPEN ──► TRANSFER ──► VERIFY ──► COMMIT ──► RESUME ──► IDLE
  IDLE ──► STAGE ──► CANARY ──► ACTIVATE ──────────► COMMIT ──► RESUME ──► IDLE      (transport Staged)
```

:data:`TRANSITIONS` has the shorter ways and the ways back. The documentation's diagram and table of phases are made from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from sglang_rollout.coordinator.update.completeness import Held
from sglang_rollout.coordinator.update.requests import Answer, Call
from sglang_rollout.wire.record import MAX_RECENT_UPDATES, EndedUpdate, UpdateOutcome, UpdateReason
from sglang_rollout.wire.states import Version


class Phase(StrEnum):
    """Where the weight update stands."""

    IDLE = "idle"
    """No update; engines generate."""
    PREPARE = "prepare"
    """Only reported, never entered: the fleet is idle, and an operation checks a request before its turn."""
    PAUSE = "pause"
    """Engines are paused. A trainer may stay here between its pause and its update."""
    OPEN = "open"
    """A process group, or a session on every engine, is being opened."""
    TRANSFER = "transfer"
    """An update is open, and tensors arrive."""
    STAGE = "stage"
    """An update with transport Staged is open: tensors arrive at the weight store, and engine pods copy them."""
    CANARY = "canary"
    """The version is complete in the engine pods, and one engine loads it."""
    ACTIVATE = "activate"
    """The version is committed in the record, and the other engines load it."""
    VERIFY = "verify"
    """Sessions end, and checksums are compared."""
    COMMIT = "commit"
    """Engines acknowledge the version, and the record is written."""
    RESUME = "resume"
    """Gates open, and engines continue."""


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    # OPEN: a process group is opened while engines generate. RESUME: engines are resumed, and no update was open.
    # STAGE: an update with transport Staged needs no pause.
    Phase.IDLE: frozenset({Phase.PAUSE, Phase.OPEN, Phase.RESUME, Phase.STAGE}),
    # TRANSFER: a checkpoint on disk needs no session. RESUME: the trainer resumed without an update. IDLE: the pause was given up.
    Phase.PAUSE: frozenset({Phase.OPEN, Phase.TRANSFER, Phase.STAGE, Phase.RESUME, Phase.IDLE}),
    # PAUSE, IDLE: the process group is open, or could not be opened, and no update is.
    Phase.OPEN: frozenset({Phase.TRANSFER, Phase.STAGE, Phase.PAUSE, Phase.IDLE}),
    # PAUSE, OPEN: engines that joined since are paused, and their sessions are opened. IDLE: the update failed or was abandoned.
    Phase.TRANSFER: frozenset({Phase.PAUSE, Phase.OPEN, Phase.VERIFY, Phase.IDLE}),
    # PAUSE, OPEN, RESUME: the trainer pauses or resumes the engines, or opens a process group, while its update is open. IDLE: the update
    # failed or was abandoned.
    Phase.STAGE: frozenset({Phase.PAUSE, Phase.OPEN, Phase.RESUME, Phase.CANARY, Phase.IDLE}),
    Phase.CANARY: frozenset({Phase.ACTIVATE, Phase.IDLE}),
    # From here an update with transport Staged only rolls forward.
    Phase.ACTIVATE: frozenset({Phase.COMMIT}),
    Phase.VERIFY: frozenset({Phase.COMMIT, Phase.IDLE}),
    # PAUSE: the trainer paused by itself, and resumes by itself.
    Phase.COMMIT: frozenset({Phase.RESUME, Phase.PAUSE, Phase.IDLE}),
    # STAGE: the trainer has ended its pause, and its update is still open.
    Phase.RESUME: frozenset({Phase.IDLE, Phase.STAGE}),
}
"""Phases that may follow each phase. A phase may also be entered again, which changes nothing."""


class IllegalTransitionError(Exception):
    """A phase was entered that cannot follow the current one: a bug. The coordinator ends and proves its state again."""


@dataclass
class PhaseClock:
    """The current phase, and the seconds spent in each phase since the fleet was last idle."""

    phase: Phase = Phase.IDLE
    since: float = 0.0
    spent: dict[Phase, float] = field(default_factory=dict)

    def enter(self, phase: Phase, now: float) -> None:
        """Advance to a phase.

        Raises:
            IllegalTransitionError: if the phase cannot follow the current one.
        """
        if phase is self.phase:
            return
        if phase not in TRANSITIONS[self.phase]:
            raise IllegalTransitionError(f"phase {phase} cannot follow phase {self.phase}")
        self.spent = {} if phase is Phase.IDLE else self._spent_by(now)
        self.phase, self.since = phase, now

    def milliseconds(self, now: float) -> dict[str, int]:
        """Return the milliseconds spent in each phase since the fleet was last idle, and their sum as ``total``."""
        spent = self._spent_by(now)
        shown = {phase.value: round(seconds * 1000) for phase, seconds in spent.items()}
        return {**shown, "total": round(sum(spent.values()) * 1000)}

    def _spent_by(self, now: float) -> dict[Phase, float]:
        if self.phase is Phase.IDLE:
            return dict(self.spent)
        return {**self.spent, self.phase: self.spent.get(self.phase, 0.0) + now - self.since}


@dataclass
class StagedUpdate:
    """The part of an update whose tensors go to the weight store first."""

    id: str
    """Identifies the update at the weight store and at the agents."""
    instance: str
    """The run of the store's process that receives the tensors. If it ends, they are lost."""
    is_upload: bool = False
    """True if a trainer uploads the version; False if it comes through process groups."""
    arrived: int = 0
    """Bytes that had arrived at the last poll of the weight store, also those of unfinished pieces. Growth shows that the trainer lives."""
    bytes: int = 0
    """Bytes of the version, once it is complete."""
    transferred: int | None = None
    """Bytes that the trainer sent; None until the version is complete."""
    is_waiting: bool = False
    """True while a trainer without uploads has committed it, and too few engines are up. The trainer is not needed any more."""
    version: Version | None = None
    """What the update becomes, once the store has the complete version; None before."""
    digest: str = ""
    """Digest of the complete version; empty before."""
    called: list[str] = field(default_factory=list)
    """Engines that were asked to load the version and may have written parts of it."""
    loaded: list[str] = field(default_factory=list)
    """Engines that have loaded and acknowledged it."""
    running: list[str] = field(default_factory=list)
    """Engines among them that generate again already."""
    fenced: set[str] = field(default_factory=set)
    """Engines that failed and are fenced already, because engines load in turn. They may load the version by themselves now."""
    unflushed: list[str] = field(default_factory=list)
    """Engines among them that kept their prefix caches, because requests still run."""
    checksums: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Checksums of the version, by the number of an engine's ranks, as the first engines reported them."""
    lost: set[str] = field(default_factory=set)
    """Engines that were restarted or went away since the version was complete. They load it when they are back."""

    restarting: set[str] = field(default_factory=set)
    """Engines among them that restart first, because they hold tensors that the version does not have."""

    @property
    def is_complete(self) -> bool:
        """True if the store has the complete version. The trainer is not needed any more."""
        return self.version is not None


@dataclass
class Update:
    """An open update: engines have received its first call and are dirty until it is complete.

    In an update with transport Staged no engine takes part before all tensors have arrived.
    """

    boots: dict[str, str]
    """The engines that take part, and their boot IDs."""
    started: float
    label: str | None = None
    author: str = ""
    """Caller that opened it; empty: not known."""
    trainer_session: bool = False
    """True if the trainer opened the session, and ends it; False if the coordinator did for a trainer that knows no sessions."""
    data: set[str] = field(default_factory=set)
    """Process groups that have sent tensors."""
    received: set[str] = field(default_factory=set)
    """Engines that have received tensors."""
    flushed: set[str] = field(default_factory=set)
    """Engines that flushed their cache with the last tensors. Paused since, they have computed nothing."""
    ended: set[str] = field(default_factory=set)
    """Engines whose session ended before those of the others, because they have all of their tensors."""
    slowest_end: float = 0.0
    """Seconds that the slowest of those took to end its session."""
    checksums: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """What the trainer says its weights are, by the number of an engine's ranks; empty if it says nothing."""
    held: dict[str, Held] = field(default_factory=dict)
    """What each engine held when it joined the update."""
    tensors: dict[tuple[str, ...], set[str]] = field(default_factory=dict)
    """Names of the tensors that came, by the engines that received them. Noted before engines receive the tensors."""
    unchecked: str = ""
    """What was not compared with the engines' model, and why, as sentences; empty if nothing."""
    before: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Checksums of engines before their first tensors, if only these can tell whether the tensors' names belong to the model."""
    has_changed_nothing: bool = False
    """True if it is proved that the update changed no tensor of any engine."""
    is_whole: bool = False
    """True if it is proved that an engine which starts from ``model.path`` needs only the tensors of this update."""
    names_unknown: bool = False
    """True if no names are known: tensors come as handles, or all of them from a checkpoint."""
    checkpoint: frozenset[str] | None = None
    """The tensors of the checkpoint that is loaded, if they are known."""
    bytes: int | None = 0
    """Bytes of the tensors that were announced; None: not known."""
    staged: StagedUpdate | None = None
    """The weight store's part; None: the transport is not Staged."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Engines that will not hold the version, and why. They are fenced. :meth:`drop` adds engines."""
    reason: UpdateReason | None = None
    """Why the first of them was dropped."""

    def drop(self, engines: Mapping[str, str], reason: UpdateReason) -> None:
        """Note engines that will not hold the version, with a sentence for each."""
        if engines and not self.dropped:
            self.reason = reason
        self.dropped.update(engines)

    def remaining(self) -> list[str]:
        """Return the engines that take part and may still commit."""
        return [name for name in self.boots if name not in self.dropped]


@dataclass(frozen=True)
class FailedCommit:
    """The failure that the calls repeat which would have committed an update (:mod:`.failed_commit`)."""

    calls: frozenset[type[Call]]
    """The kinds of these calls."""
    answer: Answer
    """The answer that the trainer got, or would have got."""
    author: str
    """Caller whose update it was; empty: not known."""
    upload: str = ""
    """ID of the update, if it was an upload; empty otherwise."""
    groups: frozenset[str] = frozenset()
    """Process groups that had sent tensors."""


@dataclass
class Transaction:
    """The weight update: its phase, the open update if there is one, and how updates ended."""

    clock: PhaseClock = field(default_factory=PhaseClock)
    update: Update | None = None
    label: str | None = None
    """Label that the trainer gave before its first tensors."""
    joining: str | None = None
    """Store (HOST:PORT) of the process group that engines are joining now."""
    last: EndedUpdate | None = None
    """How the last update ended."""
    earlier: list[EndedUpdate] = field(default_factory=list)
    """How the updates before the last one ended, newest first."""
    outcomes: Counter[UpdateOutcome] = field(default_factory=Counter)
    """Updates that ended while this coordinator led. A last update that was read from the record is not among them."""
    failed: FailedCommit | None = None
    """The last update, if it failed and the trainer has not begun again since."""

    def close(self) -> None:
        """Close the open update, if there is one. :meth:`end` notes how it ended."""
        self.update, self.label = None, None

    def end(self, last: EndedUpdate) -> None:
        """Note how an update ended. Call this once per update; later figures of the same update are assigned to ``last``."""
        self.failed = None
        if self.last is not None:
            self.earlier = [self.last.shortened(), *self.earlier][: MAX_RECENT_UPDATES - 1]
        self.last = last
        self.outcomes[last.outcome] += 1
