"""Phases of a weight update, and the one table of legal transitions. Pure.

Between two operations the fleet rests in IDLE, PAUSE (a trainer paused it, or was lost) or TRANSFER (an update is open).

```
  IDLE ──► PAUSE ──► OPEN ──► TRANSFER ──► VERIFY ──► COMMIT ──► RESUME ──► IDLE
                                  │           │          │
                                  └───────────┴──────────┴── failed, abandoned ──► IDLE

  PAUSE ──► TRANSFER     a checkpoint on disk needs no session and no process group
  PAUSE ──► RESUME       the trainer resumed without an update
  IDLE ──► OPEN          a process group is opened while engines generate
  OPEN ──► PAUSE, IDLE   the process group is open (or could not be opened), no update is
  TRANSFER ──► PAUSE, OPEN   engines that joined since are paused, and their sessions are opened
  COMMIT ──► PAUSE       the trainer paused by itself, and resumes by itself
  IDLE ──► RESUME        a call resumes engines, or ``spec.state`` does, and no update was open
```
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    """Where the weight update stands."""

    IDLE = "idle"
    PREPARE = "prepare"
    """Only reported, never entered: the fleet is idle and an operation checks a request before its turn."""
    PAUSE = "pause"
    OPEN = "open"
    TRANSFER = "transfer"
    VERIFY = "verify"
    COMMIT = "commit"
    RESUME = "resume"


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.IDLE: frozenset({Phase.PAUSE, Phase.OPEN, Phase.RESUME}),
    Phase.PAUSE: frozenset({Phase.OPEN, Phase.TRANSFER, Phase.RESUME, Phase.IDLE}),
    Phase.OPEN: frozenset({Phase.TRANSFER, Phase.PAUSE, Phase.IDLE}),
    Phase.TRANSFER: frozenset({Phase.PAUSE, Phase.OPEN, Phase.VERIFY, Phase.IDLE}),
    Phase.VERIFY: frozenset({Phase.COMMIT, Phase.IDLE}),
    Phase.COMMIT: frozenset({Phase.RESUME, Phase.PAUSE, Phase.IDLE}),
    Phase.RESUME: frozenset({Phase.IDLE}),
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
