"""One cell of the matrix: a fault in a phase, what must hold during it and after it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import requests

from e2e.chaos.ground import Ground
from e2e.chaos.stack import Stack
from e2e.chaos.tokens import FEW, MANY
from e2e.chaos.watch import Watch

SLOW = {
    "pause": "pause",
    "open": "begin",
    "transfer": "update",
    "verify": "check",
    "commit": "version",
    "resume": "continue",
}
"""The engine's call that makes a phase long enough to be hit."""
PHASES = ("idle", "prepare", "pause", "open", "transfer", "verify", "commit", "resume")
LONG = 1.5
"""Seconds that the phase lasts."""
TOLD_WITHIN = 30.0
"""The trainer learns what happened within so many seconds."""
HEALED_WITHIN = 60.0
TRUTH_WITHIN = 5.0
RELEASED_WITHIN = 30.0
"""The lease, what an engine that hangs may take to be restarted, and a margin: then no pause or session is left, without a new push. What a
real engine takes to start comes on top."""
Sleep = Callable[[float], None]


@dataclass
class Cell:
    """What came of one fault in one phase."""

    fault: str
    phase: str
    hit: bool = False
    """The coordinator said that it was in this phase when the fault landed."""
    outcome: str = ""
    """What the trainer was told of the push that was hit: committed, failed, lost."""
    told_seconds: float | None = None
    without_seconds: float | None = None
    """Until a push succeeded while the fault lasted, on whatever it spares."""
    released_seconds: float | None = None
    """Until nobody was paused or in a session any more, before anybody pushed again."""
    healed_seconds: float | None = None
    problem: str = ""
    skipped: str = ""

    @property
    def text(self) -> str:
        """The cell in the printed matrix."""
        if self.skipped:
            return "-"
        if self.problem:
            return "FAIL"
        return f"{'hit' if self.hit else 'miss'} {self.healed_seconds:.0f}s" if self.healed_seconds is not None else "?"


@dataclass(frozen=True)
class Fault:
    """How a part fails."""

    name: str
    strike: Callable[[Any], None]
    kills_trainer: bool = False
    part: str = ""
    """What must run before it can be hit."""
    undo: Callable[[Any], None] | None = None
    """Ends a fault that lasts."""
    spares: Callable[[Any], int] | None = None
    """So many engines are well while it lasts, and take a push."""
    heals_within: float = HEALED_WITHIN


def _kill_engine(stack: Stack) -> None:
    stack.engines.processes[0].kill()


def _hang_engine(stack: Stack) -> None:
    stack.hung_since = time.monotonic()
    stack.engines.processes[0].signal(signal.SIGSTOP)


def _trainer(number: int) -> Callable[[Stack], None]:
    def strike(stack: Stack) -> None:
        if stack.trainer is not None:
            stack.trainer.process.send_signal(number)

    return strike


def _part(name: str) -> Callable[[Stack], None]:
    return lambda stack: stack.signal_part(name, signal.SIGKILL)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("engine killed", _kill_engine),
        Fault("engine hung", _hang_engine),
        Fault("agent killed", _part("agent"), part="agent"),
        Fault("gate killed", _part("gate"), part="gate"),
        Fault("coordinator killed", _part("coordinator"), part="coordinator"),
        Fault("smg killed", _part("smg"), part="smg"),
        Fault("front killed", _part("front"), part="front"),
        Fault("trainer killed", _trainer(signal.SIGKILL), kills_trainer=True),
        Fault("trainer stopped", _trainer(signal.SIGSTOP), kills_trainer=True),
    )
}


class Matrix:
    """Runs cells, one after the other, on one stack."""

    def __init__(self, stack: Ground, watch: Watch) -> None:
        self._stack = stack
        self._watch = watch
        self._labels = 0

    def begin(self) -> None:
        """The first push: from here on something is committed."""
        self._stack.new_trainer()
        self._push_well(HEALED_WITHIN)
        self._watch.start(FEW, FEW, MANY)

    def run(self, fault: Fault, phase: str) -> Cell:
        """One cell."""
        cell = Cell(fault.name, phase)
        before = len(self._watch.violations)
        try:
            self._stack.rest()
            if self._stack.document().get("serving") != self._stack.number:
                self._until_served(self._stack.number, HEALED_WITHIN + self._stack.start_seconds)
            if fault.part and isinstance(self._stack, Stack):
                stack = self._stack
                stack.until(f"{fault.part} runs", lambda: stack.pids(fault.part), 30)
            self._strike(cell, fault)
            self._heal(cell, fault)
        except (AssertionError, TimeoutError, LookupError, requests.RequestException) as error:
            cell.problem = str(error) or type(error).__name__
            self._start_over(fault)
        new = self._watch.violations[before:]
        if new:
            cell.problem = f"{len(new)} wrong answers, the first: {new[0]}. {cell.problem}"
        return cell

    def _strike(self, cell: Cell, fault: Fault) -> None:
        stack, label = self._stack, ""
        if cell.phase == "prepare":
            self._ask_in_vain()
        elif cell.phase != "idle":
            label = self._prolong(cell.phase)
        if cell.phase != "idle":
            stack.until(f"phase {cell.phase}", lambda: stack.document().get("phase") == cell.phase, 15)
        cell.hit = True
        began = time.monotonic()
        fault.strike(stack)
        if label:
            self._learn(cell, fault, label, began)

    def _prolong(self, phase: str) -> str:
        """Begin a push of which this phase takes long."""
        self._stack.slow(SLOW[phase], LONG, list(range(self._stack.number)))
        # An engine that was told the version with its last tensors has nothing to do when it acknowledges.
        return self._begin("late" if phase == "commit" else "")

    def _learn(self, cell: Cell, fault: Fault, label: str, began: float) -> None:
        """What becomes of the push that was hit, as the trainer and as the fleet see it."""
        stack = self._stack
        if fault.kills_trainer:
            cell.outcome = "lost"
        elif stack.trainer is not None:
            answer = stack.trainer.outcome(TOLD_WITHIN)
            cell.outcome = "committed" if answer["ok"] else "failed"
        cell.told_seconds = time.monotonic() - began
        stack.until("the coordinator answers and rests", lambda: stack.document().get("phase") == "idle", TOLD_WITHIN)
        if stack.document()["committed"]["label"] == label:
            self._watch.committed(label)
        elif cell.outcome == "committed":
            raise AssertionError(f"the trainer was told that {label} is committed, the fleet says {stack.document()['committed']}")
        else:
            self._watch.failed(label)

    def _heal(self, cell: Cell, fault: Fault) -> None:
        stack = self._stack
        stack.calm()
        if fault.undo is None:
            cell.released_seconds = stack.until(
                "pauses and sessions have ended by themselves", lambda: not stack.paused(), RELEASED_WITHIN + stack.start_seconds
            )
        if fault.kills_trainer:
            stack.new_trainer()
        if fault.spares is not None:
            cell.without_seconds = self._until_served(fault.spares(stack), HEALED_WITHIN)
        began = time.monotonic()
        if fault.undo is not None:
            fault.undo(stack)
        self._until_served(stack.number, fault.heals_within + stack.start_seconds)
        stack.until("nobody is paused", lambda: not stack.paused(), TRUTH_WITHIN)
        cell.healed_seconds = time.monotonic() - began
        stack.until("what is published is the case", stack.is_told, TRUTH_WITHIN)

    def _until_served(self, engines: int, within: float) -> float:
        """Push until so many engines serve; returns the seconds it took."""
        stack, began = self._stack, time.monotonic()
        while True:
            left = within - (time.monotonic() - began)
            try:
                self._push_well(left)
                stack.until("all engines serve", lambda: stack.document().get("serving") == engines, min(TRUTH_WITHIN, max(left, 1)))
            except (AssertionError, TimeoutError):
                if time.monotonic() - began > within:
                    raise
            else:
                return time.monotonic() - began

    def _start_over(self, fault: Fault) -> None:
        """After a failed cell: the fault is undone, and a new trainer, so that the next cell does not fail for the same reason."""
        if fault.undo is not None:
            with suppress(Exception):  # it may have been undone already
                fault.undo(self._stack)
        self._stack.calm()
        self._stack.new_trainer()
        with suppress(AssertionError, TimeoutError):
            self._until_served(self._stack.number, max(HEALED_WITHIN, fault.heals_within) + self._stack.start_seconds)

    def _begin(self, manner: str = "") -> str:
        self._labels += 1
        label = f"v{self._labels}"
        if self._stack.trainer is None:
            raise RuntimeError("no trainer runs")
        self._watch.expected[label] = self._stack.trainer.begin(label, manner)
        return label

    def _push_well(self, within: float) -> None:
        """Push until it succeeds."""
        end, error = time.monotonic() + within, ""
        while time.monotonic() < end:
            label = self._begin()
            if self._stack.trainer is None:
                raise RuntimeError("no trainer runs")
            answer: dict[str, Any] = self._stack.trainer.outcome(70)
            if answer["ok"]:
                self._watch.committed(label)
                return
            error = answer["error"]
            if self._stack.document().get("committed", {}).get("label") == label:
                self._watch.committed(label)
            else:
                self._watch.failed(label)
            time.sleep(0.5)
        raise AssertionError(f"no push succeeded within {within:.0f} s: {error}")

    def _ask_in_vain(self) -> None:
        """A group whose store listens nowhere: engines try to reach it."""
        size = self._stack.document()["world_size"]
        body = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": size, "group_name": "nobody"}

        def ask() -> None:
            with suppress(requests.RequestException):
                requests.post(f"{self._stack.url}/init_weights_update_group", json=body, timeout=20)

        threading.Thread(target=ask, daemon=True).start()
