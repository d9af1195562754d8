"""Hits and misses of the fault matrix, with a simulated fleet that starts no process."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
from click.testing import CliRunner

from e2e.chaos import __main__ as program
from e2e.chaos import batch
from e2e.chaos.floods import REFUSED_CALLS, Flood
from e2e.chaos.matrix import FAULTS, TRIES, Cell, Fault, Matrix, Strike, phases_between
from e2e.chaos.tokens import known
from e2e.chaos.watch import Watch


class SimulatedTrainer:
    """Pushes at once. Its fleet is in ``verify`` until the matrix reads the outcome."""

    base = known([1])

    def __init__(self, fleet: SimulatedFleet) -> None:
        self._fleet = fleet
        self._label = ""

    def begin(self, label: str, manner: str = "") -> object:
        self._label = label
        self._fleet.enter(self._fleet.slow_phase)
        return known([1])

    def outcome(self, within: float) -> dict[str, Any]:
        self._fleet.label = self._label
        self._fleet.enter("idle")
        return {"ok": True, "error": ""}


class SimulatedFleet:
    """One engine that always serves, and a coordinator that logs its phases."""

    number, start_seconds, url, trainer_host = 1, 0.0, "", ""
    headers: Mapping[str, str] = {}
    slow_phase = "verify"

    def __init__(self, *_: object, **__: object) -> None:
        self.label = ""
        self.record: list[tuple[float, str]] = []
        self.enter("idle")
        self.trainer: Any = SimulatedTrainer(self)

    def __enter__(self) -> SimulatedFleet:
        return self

    def __exit__(self, *_: object) -> None: ...

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.record.append((time.time(), phase))

    def new_trainer(self) -> Any:
        self.trainer = SimulatedTrainer(self)
        return self.trainer

    def document(self) -> dict[str, Any]:
        return {"phase": self.phase, "serving": 1, "committed": {"label": self.label}}

    def phases(self) -> list[tuple[float, str]]:
        return self.record

    def slow(self, phase: str, seconds: float, engines: list[int]) -> None: ...

    def calm(self) -> None: ...

    def rest(self) -> None: ...

    def paused(self) -> list[int]:
        return []

    def is_status_current(self) -> bool:
        return True

    def until(self, what: str, check: Callable[[], Any], within: float) -> float:
        if what != "clients get answers again" and not check():  # this fleet has no clients
            raise AssertionError(f"not: {what}")
        return 0.0


def fault(fleet: SimulatedFleet, *late: bool) -> Fault:
    """Return a fault without effect. ``late``: for each try, whether the update has ended before the strike; the last value repeats."""
    tries = list(late)

    def aim(_: object) -> Strike:
        is_late = tries.pop(0) if len(tries) > 1 else tries[0]
        return lambda: fleet.enter("idle") if is_late else None

    return Fault("nothing", aim)


def run(fleet: SimulatedFleet, made: Fault, phase: str = "verify") -> Any:
    return Matrix(fleet, Watch("", {})).run(made, phase)


def test_strike_in_the_phase_is_a_hit() -> None:
    fleet = SimulatedFleet()
    cell = run(fleet, fault(fleet, False))
    assert (cell.problem, cell.text, cell.passed, cell.struck_in, cell.misses) == ("", "hit 0s", True, ["verify"], [])


def test_strike_after_the_phase_is_a_miss() -> None:
    fleet = SimulatedFleet()
    cell = run(fleet, fault(fleet, True))
    assert (cell.problem, cell.text, cell.passed) == ("", "missed", False)
    # The phase may end before the strike or during the strike, because both are microseconds apart.
    assert cell.struck_in in (["verify", "idle"], ["idle"])
    assert len(cell.misses) == TRIES
    assert all(miss.startswith("during the strike the coordinator's log shows") and miss.endswith("idle") for miss in cell.misses)


def test_missed_cell_is_repeated_until_it_is_hit() -> None:
    fleet = SimulatedFleet()
    cell = run(fleet, fault(fleet, True, False))
    assert (cell.text, cell.passed, len(cell.misses)) == ("hit 0s", True, 1)


def test_nothing_is_struck_if_the_phase_never_begins() -> None:
    fleet = SimulatedFleet()
    fleet.slow_phase = "transfer"
    cell = run(fleet, fault(fleet, False))
    assert (cell.problem, cell.text, cell.struck_in, cell.misses) == ("", "missed", [], ["not: phase verify"] * TRIES)


def test_missed_cell_is_reported_and_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = SimulatedFleet()
    monkeypatch.setattr(program, "Stack", lambda *_, **__: fleet)
    monkeypatch.setitem(FAULTS, "smg killed", fault(fleet, True))
    out = tmp_path / "chaos.json"
    done = CliRunner().invoke(program.main, ["--fault", "smg killed", "--phase", "verify", "--out", str(out)])
    assert done.exit_code == 1, done.output
    for part in (
        "1 cells, 0 hit, 1 missed",
        "try 3 missed the phase",
        "nothing in verify: missed the phase 3 times, the last time because during",
    ):
        assert part in done.output, done.output
    (cell,) = json.loads(out.read_text())
    assert (cell["result"], cell["hit"], len(cell["misses"])) == ("missed", False, TRIES)


def test_a_cell_fails_if_the_check_of_its_fault_fails() -> None:
    fleet = SimulatedFleet()

    def check(_: object, cell: Cell) -> None:
        raise AssertionError(f"after a push that {cell.outcome}")

    cell = run(fleet, replace(fault(fleet, False), check=check))
    assert (cell.problem, cell.text, cell.passed) == ("after a push that committed", "FAIL", False)


@pytest.mark.parametrize(
    ("running", "outcome", "status", "problem"),
    [
        ([1], "committed", 429, ""),
        ([2], "committed", 429, "restarted during the flood: front"),
        ([1], "failed", 429, "the push failed"),
        ([1], "", 200, "1 connections of the flood got answers {200: 1}"),
    ],
    ids=["harmless", "restart", "failed push", "accepted"],
)
def test_a_flood_restarts_nothing_and_fails_no_push(running: list[int], outcome: str, status: int, problem: str) -> None:
    flood = Flood(REFUSED_CALLS, "", {"front": [1]}, Counter({status: 1}), connected=1)
    with pytest.raises(AssertionError, match=problem) if problem else nullcontext():
        flood.check({"front": running}, outcome)


@pytest.mark.parametrize(
    ("status", "headers", "problem"),
    [(502, {"Retry-After": "1"}, ""), (503, {"Retry-After": "1"}, ""), (502, {}, "HTTP 502"), (500, {}, "HTTP 500"), (200, {}, "HTTP 200")],
)
def test_a_batch_whose_server_was_killed_must_end_with_a_retryable_error(
    status: int, headers: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = requests.Response()
    reply.status_code = status
    reply.headers.update(headers)
    monkeypatch.setattr(batch, "send_batch", lambda *_: reply)
    running = batch.RunningBatch("")
    with pytest.raises(AssertionError, match=problem) if problem else nullcontext():
        running.check_is_retryable(30)
    assert running.has_ended


def test_record_shows_the_phases_between_two_moments() -> None:
    record = [(1.0, "idle"), (2.0, "pause"), (3.0, "open")]
    between = [phases_between(record, *moments) for moments in ((1.5, 1.6), (2.0, 2.9), (2.9, 3.0), (0.1, 0.2), (9.0, 9.1))]
    assert between == [["idle"], ["pause"], ["pause", "open"], [], ["open"]]
