"""Cells of the fault matrix of transport Staged: how each phase is stretched, and what must hold in addition."""

from __future__ import annotations

import signal
import time
from contextlib import suppress

from e2e.chaos.matrix import (
    OUTCOME_WITHIN,
    RELEASED_WITHIN,
    SERVED_WITHIN,
    TRUTH_WITHIN,
    Cell,
    Fault,
    Matrix,
    MissedError,
    phases_between,
)
from e2e.chaos.staged_faults import BEFORE_ACTIVATION, FAULTS, PHASES, StagedFault, send_signal
from e2e.chaos.staged_stack import Served, StagedStack
from e2e.chaos.tokens import FEW
from e2e.chaos.watch import Watch

SLOW = {"canary": "load", "activate": "load", "commit": "load", "resume": "continue"}
"""The engine's call to slow down, so that the phase, or the phase before, is long enough."""
MANNERS = {"stage": "hold", "commit": "paused"}
"""How the trainer pushes, so that the phase is long enough, or comes at all: see ``trainer.py``."""
LONG = 3.0
"""Duration of a slow call."""
PHASE_WITHIN = 30.0
"""Maximum seconds until the phase begins."""
UNCHANGED_WITHIN = 15.0
"""Maximum seconds for the answers of all engines that the fault did not strike."""
TRAINERS = ("upload", "group")
"""How the trainers of the cells send their weights, in turn: over HTTP, and through a process group."""


class StagedMatrix(Matrix):
    """Runs cells in sequence on a fleet with transport Staged."""

    def __init__(self, stack: StagedStack, watch: Watch) -> None:
        super().__init__(stack, watch)
        self._staged = stack
        self._before: dict[str, Served | None] = {}
        """What each engine answered before the fault."""
        self._label = ""
        """Label of the push in which the fault strikes; empty if there is none."""
        self._held: list[int] = []
        """Processes that are stopped so that the phase lasts."""
        self._is_group = False
        """True if the trainer of the cell uses a process group."""
        self._struck = (0.0, 0.0)
        """Unix times of just before and just after the strike."""

    def _try(self, fault: Fault, phase: str) -> Cell:
        cell = super()._try(fault, phase)
        if cell.misses and fault.undo is not None:
            with suppress(Exception):  # the strike may not have come so far
                fault.undo(self._staged)
        return cell

    def _strike(self, cell: Cell, fault: Fault) -> tuple[float, float]:
        stack = self._staged
        stack.phase = cell.phase
        self._label = ""
        cell.trainer = "" if cell.phase == "idle" else trainer_of(fault.name, cell.phase)
        self._is_group = cell.trainer == "group"
        stack.until("all engines answer", lambda: None not in stack.served().values(), UNCHANGED_WITHIN)
        self._before = stack.served()
        self._struck = super()._strike(cell, fault)
        return self._struck

    def _prolong(self, phase: str) -> str:
        stack = self._staged
        if phase in SLOW:
            stack.slow(SLOW[phase], LONG, list(range(stack.number)))
        self._label = self._begin(f"{MANNERS.get(phase, '')} {'group' if self._is_group else ''}".strip())
        return self._label

    def _await_phase(self, phase: str) -> None:
        """Wait for the phase. COMMIT lasts as long as an agent does not answer, so an agent that has nothing to do before is stopped."""
        if phase == "commit":
            self._await("activate")
            self._held = self._staged.pids("agent", 0)
            send_signal(self._held, signal.SIGSTOP)
        if phase != "idle":
            self._await(phase)

    def _await(self, phase: str) -> None:
        try:
            self._staged.until(f"phase {phase}", lambda: self._staged.document().get("phase") == phase, PHASE_WITHIN)
        except AssertionError as error:
            raise MissedError(str(error)) from error

    def _learn(self, cell: Cell, label: str, began: float, *, lost: bool = False, within: float = OUTCOME_WITHIN) -> None:
        send_signal(self._held, signal.SIGCONT)
        self._held = []
        super()._learn(cell, label, began, lost=lost, within=within)

    def _heal(self, cell: Cell, fault: Fault) -> None:
        """Check the outcome, and that all engines serve the committed version again without a push. Then push."""
        stack, began = self._staged, time.monotonic()
        stack.calm()
        if phases_between(stack.phases(), *self._struck) == [cell.phase]:
            self._check_outcome(cell, fault)
        if fault.undo is not None:
            fault.undo(stack)
            began = time.monotonic()
        else:
            cell.released_seconds = stack.until(
                "pauses and sessions have ended", lambda: not stack.paused(), RELEASED_WITHIN + stack.start_seconds
            )
        stack.until("all engines serve the committed version without a push", self._is_served, fault.heals_within + stack.start_seconds)
        cell.healed_seconds = time.monotonic() - began
        if fault.kills_trainer:
            stack.new_trainer()
        self._until_served(stack.number, fault.heals_within + stack.start_seconds)
        stack.until("no engine is paused", lambda: not stack.paused(), TRUTH_WITHIN)
        stack.until("the published state is current", stack.is_status_current, TRUTH_WITHIN)
        answers = self._watch.answers
        stack.until("clients get answers again", lambda: self._watch.answers > answers, SERVED_WITHIN)

    def _check_outcome(self, cell: Cell, fault: Fault) -> None:
        """Check what the trainer got, and what the engines serve. Raises AssertionError."""
        stack = self._staged
        is_committed = bool(self._label) and stack.document()["committed"]["label"] == self._label
        if isinstance(fault, StagedFault) and self._label:
            check_push(fault, cell, stack.engine_names)
        if cell.phase in BEFORE_ACTIVATION and not is_committed:
            if self._label in self._watch.answered:
                raise AssertionError(f"an engine answered with version {self._label}, which was never committed")
            struck = {stack.engine_names[stack.victim]} if may_close_gate(fault, cell.phase) else set()
            stack.until("the other engines answer as before the fault", lambda: self._is_unchanged(struck), UNCHANGED_WITHIN)

    def _is_unchanged(self, struck: set[str]) -> bool:
        """Return whether all engines answer as before the fault. Engines in ``struck`` may not answer. Raises AssertionError."""
        found = self._staged.served()
        changed = {name: answer for name, answer in found.items() if answer not in (None, self._before.get(name))}
        if changed:
            raise AssertionError(f"engines answered {self._before} before the fault, and {changed} after it")
        return all(found.get(name) is not None for name in self._before if name not in struck)

    def _is_served(self) -> bool:
        """Return whether every engine answers with label and tokens of the committed version."""
        stack = self._staged
        document = stack.document()
        if document.get("serving") != stack.number:
            return False
        label = document["committed"]["label"]
        tokens = self._watch.expected[label]([], FEW)
        return set(stack.served().values()) == {(label, tuple(tokens or ()))}


def trainer_of(fault: str, phase: str) -> str:
    """Return how the trainer of a cell sends its weights."""
    return TRAINERS[(list(FAULTS).index(fault) + PHASES.index(phase)) % len(TRAINERS)] if fault in FAULTS else TRAINERS[0]


def may_close_gate(fault: Fault, phase: str) -> bool:
    """Return whether the engine that loads the version first may be closed for a while after the fault."""
    return phase == "canary" or (isinstance(fault, StagedFault) and fault.in_pod)


def check_push(fault: StagedFault, cell: Cell, engines: list[str]) -> None:
    """Check the outcome of the push in which a fault struck. Raises AssertionError."""
    if fault.in_pod and cell.outcome != "committed":
        raise AssertionError(f"the fault of one engine reached the trainer: {cell.error}")
    if fault.fails and cell.outcome != "failed":
        raise AssertionError(f"the push must fail, but the trainer got: {cell.outcome}")
    if fault.fenced is not None and sorted(cell.fenced) != [engines[index] for index in fault.fenced]:
        raise AssertionError(f"the push must be committed without engines {fault.fenced}, but was without {cell.fenced}")
