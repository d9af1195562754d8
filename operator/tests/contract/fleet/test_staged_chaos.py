"""Some cells of the fault matrix of transport Staged, which ``make chaos`` runs completely."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from e2e.chaos.staged_faults import FAULTS, StagedFault, skip_reason
from e2e.chaos.staged_matrix import StagedMatrix
from e2e.chaos.staged_stack import StagedStack
from e2e.chaos.tokens import stand_in
from e2e.chaos.watch import Watch

from sglang_rollout.testing import StandIn
from sglang_rollout.testing.policy import policy_digest

pytestmark = [pytest.mark.engine, pytest.mark.router, pytest.mark.timeout(900)]

CELLS = [
    ("engine killed", "canary"),
    ("coordinator killed", "activate"),
    ("trainer killed", "stage"),
    ("peer sends wrong bytes", "stage"),
    ("all engines refuse", "canary"),
]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StagedMatrix, StagedStack, Watch]]:
    """Yield a fleet of processes with a committed version, and clients that send requests all the time."""
    with StagedStack(tmp_path_factory.mktemp("chaos"), 26550) as stack:
        with StandIn() as base:
            watch = Watch(stack.url, {"default": stand_in(policy_digest(base.tensors()))})
        made = StagedMatrix(stack, watch)
        made.begin()
        yield made, stack, watch
        watch.stop()


@pytest.mark.parametrize(("fault", "phase"), CELLS, ids=[f"{fault} in {phase}".replace(" ", "-") for fault, phase in CELLS])
def test_no_fault_reaches_the_trainer_or_changes_what_is_served(
    matrix: tuple[StagedMatrix, StagedStack, Watch], fault: str, phase: str
) -> None:
    made, stack, watch = matrix
    if reason := skip_reason(FAULTS[fault], phase, stack):
        pytest.skip(reason)
    cell = made.run(FAULTS[fault], phase)
    assert (cell.problem, cell.hit, watch.violations) == ("", True, []), cell.misses


def test_a_failure_that_reaches_the_trainer_is_found(matrix: tuple[StagedMatrix, StagedStack, Watch]) -> None:
    """The loss of the weight store fails a push, as the fault of one engine must not."""
    made, _, _ = matrix
    store = FAULTS["store killed"]
    assert isinstance(store, StagedFault)
    assert "reached the trainer" in made.run(replace(store, in_pod=True), "stage").problem
