"""Some cells of the fault matrix, which ``make chaos`` runs completely: processes die during an update, and clients check the answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e.chaos.matrix import FAULTS, Fault, Matrix, Strike
from e2e.chaos.stack import Stack
from e2e.chaos.tokens import known, stand_in
from e2e.chaos.watch import Watch

from sglang_rollout.testing import StandIn
from sglang_rollout.testing.policy import policy_digest

pytestmark = [pytest.mark.engine, pytest.mark.router, pytest.mark.timeout(600)]

CELLS = [
    ("engine killed", "transfer"),
    ("agent killed", "commit"),
    ("gate killed", "idle"),
    ("coordinator killed", "verify"),
    ("batches killed", "idle"),
    ("smg killed", "idle"),
    ("trainer killed", "transfer"),
    ("flood of refused calls", "transfer"),
    ("flood of slow bodies", "verify"),
    ("flood of malformed bodies", "open"),
]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Matrix, Watch]]:
    """Yield a stack of processes with a committed version, and clients that send requests all the time."""
    with Stack(tmp_path_factory.mktemp("chaos"), 26500) as stack:
        with StandIn() as base:
            watch = Watch(stack.url, {"default": stand_in(policy_digest(base.tensors()))})
        made = Matrix(stack, watch)
        made.begin()
        yield made, watch
        watch.stop()


def test_no_answer_has_a_wrong_version_when_a_process_dies(matrix: tuple[Matrix, Watch]) -> None:
    made, watch = matrix
    cells = [made.run(FAULTS[fault], phase) for fault, phase in CELLS]
    assert {f"{cell.fault} in {cell.phase}": cell.problem for cell in cells if cell.problem} == {}
    assert {f"{cell.fault} in {cell.phase}": cell.misses for cell in cells if not cell.hit} == {}
    for _ in range(20):  # the updates of the cells nearly always suffice
        if watch.spanning:
            break
        made.push()
    assert watch.violations == []
    assert watch.spanning > 0, "no request ran during an update, so no answer over an update was checked"


def test_a_kill_after_the_end_of_the_update_is_reported_as_missed(matrix: tuple[Matrix, Watch], monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = matrix
    monkeypatch.setattr("e2e.chaos.matrix.TRIES", 1)

    def aim(stack: Stack) -> Strike:
        kill = FAULTS["smg killed"].aim(stack)

        def strike() -> None:
            stack.until("the update has ended", lambda: stack.document().get("phase") == "idle", 30)
            kill()

        return strike

    cell = made.run(Fault("smg killed", aim, part="smg"), "verify")
    assert (cell.problem, cell.text, cell.passed) == ("", "missed", False)
    assert (cell.struck_in[0], cell.struck_in[-1]) == ("verify", "idle")


def test_the_watch_finds_wrong_answers() -> None:
    """Otherwise a client that checks nothing would make every cell pass."""
    watch = Watch("http://nowhere", {"v1": known([1, 2]), "v2": known([3, 4])})
    watch.committed("v1")
    right = {"output_ids": [1, 2], "meta_info": {"weight_version": "v1"}}
    watch._judge(right, began=1e12)
    assert watch.violations == []
    watch._judge({"output_ids": [1, 4], "meta_info": {"weight_version": "v1"}}, began=1e12)
    watch._judge({"output_ids": [3, 4], "meta_info": {"weight_version": "v1"}}, began=1e12)
    watch._judge({"output_ids": [1, 2], "meta_info": {"weight_version": "v0"}}, began=1e12)
    watch.committed("v2")
    watch._judge(right, began=1e12)
    watch.failed("v3")
    wanted = ("no version", "tokens of v2", "labelled v0 holds the tokens of v1", "after it was replaced")
    assert [part in found for part, found in zip(wanted, watch.violations, strict=True)] == [True] * 4


def test_the_watch_judges_an_answer_over_an_update_token_by_token() -> None:
    old, new = stand_in(b"old"), stand_in(b"new")
    watch = Watch("http://nowhere", {"v1": old, "v2": new})
    first = old([], 3) or []
    tokens = [*first, *(new(first, 2) or [])]
    spans = [{"version": "v1", "start": 0, "end": 3}, {"version": "v2", "start": 3, "end": 5}]
    answer = {"output_ids": tokens, "meta_info": {"weight_version": "v2", "weight_versions": spans}}
    watch._judge(answer, began=0.0)
    assert (watch.violations, watch.spanning) == ([], 1)
    watch._judge({**answer, "output_ids": [*tokens[:4], tokens[4] + 1]}, began=0.0)
    watch.committed("v2")
    watch._judge(answer, began=1e12)
    assert ["labelled v2 holds tokens of no version" in watch.violations[0], "version v1 began" in watch.violations[1]] == [True, True]
