"""What the fault matrix of transport Staged demands, without processes: outcomes, spoiled files, and what is never run."""

from __future__ import annotations

import json
import struct
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from e2e.chaos import staged_matrix
from e2e.chaos.matrix import Cell
from e2e.chaos.staged_faults import FAULTS, PHASES, StagedFault, flipped, skip_reason, swap_sizes
from e2e.chaos.staged_matrix import TRAINERS, StagedMatrix, check_push, trainer_of
from e2e.chaos.staged_stack import StagedStack
from e2e.chaos.watch import Watch

ENGINES = ["e0", "e1", "e2"]


def safetensors(folder: Path, **shapes: list[int]) -> Path:
    """Write a file with a byte per element."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "U8", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    path = folder / "00000.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(range(end)))
    return path


def shapes_in(path: Path) -> dict[str, list[int]]:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    return {name: entry["shape"] for name, entry in header.items()}


def fault(name: str) -> StagedFault:
    return cast(StagedFault, FAULTS[name])


@pytest.mark.parametrize(
    ("name", "outcome", "fenced", "problem"),
    [
        ("engine killed", "committed", ["e0"], ""),
        ("engine killed", "failed", [], "the fault of one engine reached the trainer: why"),
        ("agent killed", "failed", [], "the fault of one engine reached the trainer: why"),
        ("store killed", "failed", [], ""),
        ("all engines refuse", "failed", [], ""),
        ("all engines refuse", "committed", [], "the push must fail"),
        ("volume of an engine full", "committed", ["e0"], ""),
        ("volume of an engine full", "committed", [], "must be committed without engines"),
        ("peer sends wrong bytes", "committed", ["e1"], "must be committed without engines"),
    ],
)
def test_the_trainer_must_not_notice_the_fault_of_one_engine(name: str, outcome: str, fenced: list[str], problem: str) -> None:
    cell = Cell(name, "stage", outcome=outcome, error="why", fenced=fenced)
    with pytest.raises(AssertionError, match=problem) if problem else nullcontext():
        check_push(fault(name), cell, ENGINES)


class AnsweringFleet:
    """A fleet with fixed answers of its engines."""

    engine_names, number, victim, start_seconds = ENGINES, 3, 0, 0.0

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def served(self) -> dict[str, Any]:
        return self.answers

    def document(self) -> dict[str, Any]:
        return {"committed": {"label": "v1"}}

    def until(self, what: str, check: Any, within: float) -> float:
        assert check(), what
        return 0.0


OLD, NEW = ("v1", (1, 2)), ("v2", (3, 4))


@pytest.mark.parametrize(
    ("name", "phase", "after", "answered", "problem"),
    [
        ("engine killed", "idle", {"e0": None, "e1": OLD, "e2": OLD}, {"v1"}, ""),
        ("engine killed", "idle", {"e0": OLD, "e1": None, "e2": OLD}, {"v1"}, "other engines answer as before"),
        ("store killed", "stage", {"e0": None, "e1": OLD, "e2": OLD}, {"v1"}, "other engines answer as before"),
        ("coordinator killed", "canary", {"e0": None, "e1": OLD, "e2": OLD}, {"v1"}, ""),
        ("coordinator killed", "canary", {"e0": NEW, "e1": OLD, "e2": OLD}, {"v1"}, "before the fault, and"),
        ("store killed", "idle", {"e0": OLD, "e1": OLD, "e2": ("v1", (9, 9))}, {"v1"}, "before the fault, and"),
        ("trainer killed", "stage", {"e0": OLD, "e1": OLD, "e2": OLD}, {"v1", "v2"}, "which was never committed"),
        ("coordinator killed", "activate", {"e0": NEW, "e1": None, "e2": OLD}, {"v1"}, ""),
    ],
)
def test_no_fault_before_activation_may_change_what_engines_answer(
    name: str, phase: str, after: dict[str, Any], answered: set[str], problem: str
) -> None:
    matrix = StagedMatrix(cast(StagedStack, AnsweringFleet(**after)), Watch("", {}, answered=answered))
    matrix._before, matrix._label = dict.fromkeys(ENGINES, OLD), "" if phase == "idle" else "v2"
    with pytest.raises(AssertionError, match=problem) if problem else nullcontext():
        matrix._check_outcome(Cell(name, phase, outcome="failed"), fault(name))


def test_trainers_alternate_between_neighbouring_cells() -> None:
    for name in FAULTS:
        ways = [trainer_of(name, phase) for phase in PHASES]
        assert all(first != second for first, second in pairwise(ways))
    assert {trainer_of(name, "stage") for name in FAULTS} == set(TRAINERS)


def test_cells_without_effect_are_skipped_with_a_reason() -> None:
    stack = cast(StagedStack, AnsweringFleet())
    stack.can_mount = False
    reasons = {phase: skip_reason(fault("volume of the store full"), phase, stack) for phase in ("stage", "canary")}
    assert reasons == {"stage": "only root can mount the volumes", "canary": "the fault has no effect in this phase"}
    assert [skip_reason(fault("engine killed"), phase, stack) for phase in PHASES] == [""] * len(PHASES)
    stack.number = 2
    assert skip_reason(fault("peer sends wrong bytes"), "stage", stack) == "two engines are too few"


def test_a_misshapen_tensor_keeps_the_size_of_the_file(tmp_path: Path) -> None:
    path = safetensors(tmp_path, a=[3, 4], b=[5, 2], c=[4, 4], d=[7])
    before = path.read_bytes()
    path.write_bytes(swap_sizes(before))
    assert len(path.read_bytes()) == len(before)
    assert shapes_in(path) == {"a": [3, 4], "b": [2, 5], "c": [4, 4], "d": [7]}
    square = safetensors(tmp_path, c=[4, 4], d=[7]).read_bytes()
    assert swap_sizes(square) == square


def test_wrong_bytes_become_right_again(tmp_path: Path) -> None:
    path = safetensors(tmp_path, a=[40])
    before = path.read_bytes()
    with flipped([path]):
        during = path.read_bytes()
        assert (len(during), during[:-16]) == (len(before), before[:-16])
        assert during != before
    assert path.read_bytes() == before


def test_the_matrix_stretches_every_phase_of_an_update() -> None:
    assert {*staged_matrix.SLOW, *staged_matrix.MANNERS, "idle"} == set(PHASES)
