"""A few cells of the fault matrix (``make chaos`` runs all): parts die in the middle of an update, under a client that judges answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.chaos.matrix import FAULTS, Matrix
from e2e.chaos.stack import Stack
from e2e.chaos.trainer_protocol import PROMPT, TOKENS
from e2e.chaos.watch import Watch

from sglang_rollout.trainer.testing import StandIn, expected_tokens

pytestmark = [pytest.mark.engine, pytest.mark.router, pytest.mark.timeout(600)]

CELLS = [
    ("engine killed", "transfer"),
    ("agent killed", "commit"),
    ("gate killed", "idle"),
    ("coordinator killed", "verify"),
    ("smg killed", "idle"),
    ("trainer killed", "transfer"),
]


def test_whatever_dies_no_answer_is_of_the_wrong_version_and_the_next_update_works(tmp_path: Path) -> None:
    with Stack(tmp_path, 26500) as stack:
        with StandIn() as base:
            watch = Watch(stack.url, {"default": expected_tokens(base.tensors(), PROMPT, TOKENS)})
        matrix = Matrix(stack, watch)
        matrix.begin()
        cells = [matrix.run(FAULTS[fault], phase) for fault, phase in CELLS]
        watch.stop()
    assert {f"{cell.fault} in {cell.phase}": cell.problem for cell in cells if cell.problem} == {}
    assert all(cell.hit for cell in cells)
    assert watch.violations == []
    assert watch.answers > 100, "somebody must have asked"


def test_the_watch_sees_what_is_wrong() -> None:
    """Without this, a client that judges nothing would make every cell pass."""
    watch = Watch("http://nowhere", {"v1": [1, 2], "v2": [3, 4]})
    watch.committed("v1")
    right = {"output_ids": [1, 2], "meta_info": {"weight_version": "v1"}}
    watch._judge(right, began=1e12)
    assert watch.violations == []
    watch._judge({"output_ids": [1, 4], "meta_info": {"weight_version": "v1"}}, began=1e12)
    watch._judge({"output_ids": [3, 4], "meta_info": {"weight_version": "v1"}}, began=1e12)
    watch.committed("v2")
    watch._judge(right, began=1e12)
    watch.failed("v3")
    assert [part in said for part, said in zip(("no version", "tokens of v2", "after it was replaced"), watch.violations, strict=True)] == [
        True,
        True,
        True,
    ]
