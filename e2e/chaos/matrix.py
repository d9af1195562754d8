"""Cells of the fault matrix: a fault in a phase, and the checks during and after the fault."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import requests

from e2e.chaos.batch import RunningBatch, is_complete, send_batch
from e2e.chaos.floods import MALFORMED_BODIES, REFUSED_CALLS, SLOW_BODIES, Flood, FloodKind
from e2e.chaos.stack import Stack
from e2e.chaos.target import FaultTarget
from e2e.chaos.tokens import FEW, MANY, PROMPT
from e2e.chaos.watch import Watch

SLOW = {
    "pause": "pause",
    "open": "begin",
    "transfer": "update",
    "verify": "check",
    "commit": "version",
    "resume": "continue",
}
"""The engine's call to slow down, so that the phase is long enough to hit."""
PHASES = ("idle", "prepare", "pause", "open", "transfer", "verify", "commit", "resume")
LONG = 1.5
"""Duration of the phase."""
OUTCOME_WITHIN = 30.0
"""Maximum seconds until the trainer learns the outcome."""
HEALED_WITHIN = 60.0
TRUTH_WITHIN = 5.0
RELEASED_WITHIN = 30.0
"""Maximum seconds until no pause or session is left, without a new push: the lease, the restart of a hung engine, and a margin. The start
of a real engine is added."""
SERVED_WITHIN = 30.0
"""Maximum seconds until clients get answers again after a fault."""
TRIES = 3
"""Maximum number of runs of a cell until the fault hits the phase."""
Strike = Callable[[], object]


@dataclass
class Cell:
    """Result of one fault in one phase."""

    fault: str
    phase: str
    hit: bool = False
    """True if the coordinator's log shows this phase, and no other, during the strike."""
    struck_in: list[str] = field(default_factory=list)
    """Phases that the coordinator's log shows during the strike. Empty if nothing was struck."""
    misses: list[str] = field(default_factory=list)
    """Why each earlier try, and this one if it is a miss, missed the phase."""
    outcome: str = ""
    """Outcome of the interrupted push as the trainer saw it: committed, failed or lost."""
    error: str = ""
    """Why the interrupted push failed, as the trainer saw it."""
    fenced: list[str] = field(default_factory=list)
    """Engines without which the push was committed."""
    trainer: str = ""
    """How the trainer sent the weights, if the trainers alternate."""
    outcome_seconds: float | None = None
    without_seconds: float | None = None
    """Seconds until a push to the unaffected engines succeeded during the fault."""
    released_seconds: float | None = None
    """Seconds until no engine was paused or in a session, before the next push."""
    healed_seconds: float | None = None
    problem: str = ""
    skipped: str = ""

    @property
    def text(self) -> str:
        """Text of the cell in the printed matrix."""
        if self.skipped:
            return "-"
        if self.problem:
            return "FAIL"
        if not self.hit:
            return "missed"
        return f"hit {self.healed_seconds:.0f}s" if self.healed_seconds is not None else "?"

    @property
    def passed(self) -> bool:
        """True if the fault hit the phase and all checks passed, or the cell is skipped on purpose."""
        return bool(self.skipped) or (self.hit and not self.problem)


@dataclass(frozen=True)
class Fault:
    """How a part fails."""

    name: str
    aim: Callable[[Any], Strike]
    """Find what to strike, before the phase begins. The strike itself is then only a signal or one command."""
    kills_trainer: bool = False
    part: str = ""
    """What must run before it can be hit."""
    undo: Callable[[Any], None] | None = None
    """Ends a lasting fault."""
    spares: Callable[[Any], int] | None = None
    """Number of engines that work during the fault and accept a push."""
    heals_within: float = HEALED_WITHIN
    outcome_within: float = OUTCOME_WITHIN
    """Maximum seconds until the trainer learns the outcome."""
    check: Callable[[Any, Cell], None] | None = None
    """What must also hold after this fault. Raises AssertionError."""


class MissedError(Exception):
    """The strike found nothing to hit, or the phase did not come. ``str()`` names the reason."""


def aim_signal(what: str, pids: list[int], number: int) -> Strike:
    """Return the strike that sends a signal to these processes.

    Raises:
        LookupError: There is no such process.
    """
    if not pids:
        raise LookupError(f"no process of {what} runs")

    def strike() -> None:
        struck = 0
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                struck += 1
        if not struck:
            raise MissedError(f"all processes of {what} had ended before the strike")

    return strike


def phases_between(record: list[tuple[float, str]], began: float, ended: float) -> list[str]:
    """Return the phases that a record shows from one moment to another, the one in force at the first moment included."""
    before = [phase for at, phase in record if at <= began][-1:]
    return before + [phase for at, phase in record if began < at <= ended]


def _engine(number: int) -> Callable[[Stack], Strike]:
    def aim(stack: Stack) -> Strike:
        engine = stack.engines.processes[0]

        def strike() -> None:
            engine.signal(number)
            if number == signal.SIGSTOP:
                stack.hung_since[0] = time.monotonic()

        return strike

    return aim


def _trainer(number: int) -> Callable[[Stack], Strike]:
    return lambda stack: aim_signal("the trainer", [stack.trainer.process.pid] if stack.trainer is not None else [], number)


def _part(name: str) -> Callable[[Stack], Strike]:
    return lambda stack: aim_signal(name, stack.pids(name), signal.SIGKILL)


def _batch_server(stack: Stack) -> Strike:
    """Send a batch, and kill the batch server while the batch runs."""
    kill = _part("batches")(stack)
    batch = stack.batch = RunningBatch(stack.url)
    stack.until("the batch server has a batch", stack.has_batch, 15)

    def strike() -> None:
        if batch.has_ended:
            raise MissedError("the batch had ended before the strike")
        kill()

    return strike


def _check_without_batch_server(stack: Stack, cell: Cell) -> None:
    """Check that only the batch failed, and that the next batch is answered."""
    if cell.outcome not in ("", "committed"):
        raise AssertionError(f"an update does not need the batch server, but the push {cell.outcome}")
    body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": FEW}}
    requests.post(f"{stack.url}/generate", json=body, timeout=SERVED_WITHIN).raise_for_status()
    if stack.batch is not None:
        stack.batch.check_is_retryable(OUTCOME_WITHIN)
    stack.until("the next batch is answered", lambda: is_complete(send_batch(stack.url, FEW), FEW), SERVED_WITHIN)


def _flood(name: str, kind: FloodKind) -> Fault:
    """Return the flood of a kind. While it lasts, all engines accept a push."""

    def aim(stack: Stack) -> Strike:
        stack.flood = Flood(kind, stack.url, stack.processes())
        return stack.flood.start

    def check(stack: Stack, cell: Cell) -> None:
        if stack.flood is not None:
            stack.flood.check(stack.processes(), cell.outcome)

    def undo(stack: Stack) -> None:
        if stack.flood is not None:
            stack.flood.stop()

    return Fault(name, aim, undo=undo, spares=lambda stack: stack.number, check=check)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("engine killed", _engine(signal.SIGKILL)),
        Fault("engine hung", _engine(signal.SIGSTOP)),
        Fault("agent killed", _part("agent"), part="agent"),
        Fault("gate killed", _part("gate"), part="gate"),
        Fault("coordinator killed", _part("coordinator"), part="coordinator"),
        Fault("batches killed", _batch_server, part="batches", check=_check_without_batch_server),
        Fault("smg killed", _part("smg"), part="smg"),
        Fault("front killed", _part("front"), part="front"),
        Fault("trainer killed", _trainer(signal.SIGKILL), kills_trainer=True),
        Fault("trainer stopped", _trainer(signal.SIGSTOP), kills_trainer=True),
        _flood("flood of refused calls", REFUSED_CALLS),
        _flood("flood of slow bodies", SLOW_BODIES),
        _flood("flood of malformed bodies", MALFORMED_BODIES),
    )
}


class Matrix:
    """Runs cells in sequence on one stack."""

    def __init__(self, stack: FaultTarget, watch: Watch) -> None:
        self._stack = stack
        self._watch = watch
        self._labels = 0

    def begin(self) -> None:
        """Push the first version."""
        self._stack.new_trainer()
        self._push_well(HEALED_WITHIN)
        self._watch.start(FEW, FEW, MANY)

    def push(self) -> None:
        """Push one version, which must succeed."""
        self._push_well(HEALED_WITHIN)

    def run(self, fault: Fault, phase: str) -> Cell:
        """Run one cell, again if the fault missed the phase, at most ``TRIES`` times."""
        misses: list[str] = []
        while True:
            cell = self._try(fault, phase)
            misses += cell.misses
            cell.misses = misses
            if cell.passed or cell.problem or len(misses) >= TRIES:
                return cell

    def _try(self, fault: Fault, phase: str) -> Cell:
        cell = Cell(fault.name, phase)
        before = len(self._watch.violations)
        try:
            self._stack.rest()
            if self._stack.document().get("serving") != self._stack.number:
                self._until_served(self._stack.number, HEALED_WITHIN + self._stack.start_seconds)
            if fault.part and isinstance(self._stack, Stack):
                stack = self._stack
                stack.until(f"{fault.part} runs", lambda: stack.pids(fault.part), 30)
            began, ended = self._strike(cell, fault)
            self._heal(cell, fault)
            cell.struck_in = phases_between(self._stack.phases(), began, ended)
            cell.hit = cell.struck_in == [phase]
            if not cell.hit:
                cell.misses = [f"during the strike the coordinator's log shows {', '.join(cell.struck_in) or 'no phase'}"]
        except MissedError as missed:
            cell.misses = [str(missed)]
            self._stack.calm()
        except (AssertionError, TimeoutError, LookupError, requests.RequestException) as error:
            cell.problem = str(error) or type(error).__name__
            self._start_over(fault)
        new = self._watch.violations[before:]
        if new:
            cell.problem = f"{len(new)} wrong answers, the first: {new[0]}. {cell.problem}"
        return cell

    def _strike(self, cell: Cell, fault: Fault) -> tuple[float, float]:
        """Strike in the phase of the cell; returns the Unix times of just before and just after the strike."""
        stack, label = self._stack, ""
        strike = fault.aim(stack)
        if cell.phase == "prepare":
            self._open_unreachable_group()
        elif cell.phase != "idle":
            label = self._prolong(cell.phase)
        try:
            self._await_phase(cell.phase)
            since, began = time.monotonic(), time.time()
            strike()
            ended = time.time()
        except MissedError:
            if label:
                self._learn(cell, label, time.monotonic())
            raise
        if label:
            self._learn(cell, label, since, lost=fault.kills_trainer, within=fault.outcome_within)
        return began, ended

    def _await_phase(self, phase: str) -> None:
        if phase != "idle":
            try:
                self._stack.until(f"phase {phase}", lambda: self._stack.document().get("phase") == phase, 15)
            except AssertionError as error:
                raise MissedError(str(error)) from error

    def _prolong(self, phase: str) -> str:
        """Begin a push and slow down this phase."""
        self._stack.slow(SLOW[phase], LONG, list(range(self._stack.number)))
        # An engine that receives the version with its last tensors has nothing to do at the commit.
        return self._begin("late" if phase == "commit" else "")

    def _learn(self, cell: Cell, label: str, began: float, *, lost: bool = False, within: float = OUTCOME_WITHIN) -> None:
        """Record the outcome of the push, as the trainer and as the fleet see it. ``lost``: the strike hit the trainer itself."""
        stack = self._stack
        if lost:
            cell.outcome = "lost"
        elif stack.trainer is not None:
            answer = stack.trainer.outcome(within)
            cell.outcome, cell.error = "committed" if answer["ok"] else "failed", answer["error"]
            cell.fenced = list(answer.get("fenced", ()))
        cell.outcome_seconds = time.monotonic() - began
        stack.until("the coordinator is idle", lambda: stack.document().get("phase") == "idle", within)
        if stack.document()["committed"]["label"] == label:
            self._watch.committed(label)
        elif cell.outcome == "committed":
            raise AssertionError(f"the trainer's push of {label} succeeded, but the fleet has committed {stack.document()['committed']}")
        else:
            self._watch.failed(label)

    def _heal(self, cell: Cell, fault: Fault) -> None:
        stack = self._stack
        stack.calm()
        if fault.undo is None:
            cell.released_seconds = stack.until(
                "pauses and sessions have ended", lambda: not stack.paused(), RELEASED_WITHIN + stack.start_seconds
            )
        if fault.kills_trainer:
            stack.new_trainer()
        if fault.spares is not None:
            cell.without_seconds = self._until_served(fault.spares(stack), HEALED_WITHIN)
        if fault.check is not None:
            fault.check(stack, cell)
        began = time.monotonic()
        if fault.undo is not None:
            fault.undo(stack)
        self._until_served(stack.number, fault.heals_within + stack.start_seconds)
        stack.until("no engine is paused", lambda: not stack.paused(), TRUTH_WITHIN)
        cell.healed_seconds = time.monotonic() - began
        stack.until("the published state is current", stack.is_status_current, TRUTH_WITHIN)
        answers = self._watch.answers
        stack.until("clients get answers again", lambda: self._watch.answers > answers, SERVED_WITHIN)

    def _until_served(self, engines: int, within: float) -> float:
        """Push until this number of engines serves, and return the seconds it took."""
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
        """Undo the fault of a failed cell and start a new trainer, so that the next cell is independent."""
        if fault.undo is not None:
            with suppress(Exception):  # the fault may have been undone already
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

    def _open_unreachable_group(self) -> None:
        """Open a process group whose store does not listen, so that engines try to reach it."""
        size = self._stack.document()["world_size"]
        body = {
            "master_address": self._stack.trainer_host,
            "master_port": 9,
            "rank_offset": 1,
            "world_size": size,
            "group_name": "unreachable",
        }

        def ask() -> None:
            with suppress(requests.RequestException):
                requests.post(f"{self._stack.url}/init_weights_update_group", json=body, headers=self._stack.headers, timeout=20)

        threading.Thread(target=ask, daemon=True).start()
