"""Trainers with sharded weights: torchrun starts 2 and 4 ranks, which push FSDP2 state dicts to a real engine."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.engine import environment

from tests.contract.support.local_fleet import Urls, engines_behind_a_url
from tests.support.paths import OPERATOR, TRAINERS

pytestmark = [pytest.mark.router, pytest.mark.engine, pytest.mark.timeout(300)]

Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def fleet(engine_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Urls]:
    """One engine behind a URL."""
    with engines_behind_a_url(tmp_path_factory.mktemp("fleet"), 1) as made:
        yield made


def torchrun(fleet: Urls, snapshots: Path, ranks: int, *cases: str) -> Seen:
    """Run cases one after another, and return what each rank saw."""
    variables = environment.environment_variables()
    del variables["TORCHDYNAMO_DISABLE"]  # a case compiles its model
    variables |= {"PYTHONPATH": os.pathsep.join([str(OPERATOR), variables["PYTHONPATH"]]), "SNAPSHOTS": str(snapshots)}
    command = [str(environment.python(make=False)), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(TRAINERS / "sharded.py"), fleet.fleet, fleet.model, *cases]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"rank"')]
    assert sorted(row["rank"] for row in rows) == list(range(ranks))
    return sorted(rows, key=lambda row: row["rank"])


@pytest.fixture(scope="module")
def two(fleet: Urls, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Two ranks on a mesh of one dimension."""
    return torchrun(fleet, tmp_path_factory.mktemp("snapshots"), 2, "sharded", "stopped")


@pytest.fixture(scope="module")
def four(fleet: Urls, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Four ranks on a mesh of two dimensions."""
    return torchrun(fleet, tmp_path_factory.mktemp("snapshots"), 4, "sharded", "bad")


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_an_engine_holds_the_weights_pushed_by_fsdp_ranks(ranks: str, request: pytest.FixtureRequest) -> None:
    seen: Seen = [row["sharded"] for row in request.getfixturevalue(ranks)]
    for row in seen:
        assert [(push["version"], push["equal"]) for push in row["rows"]] == [("1", True), ("2", True)]
        assert 1 < row["rows"][0]["buckets"] == row["rows"][1]["buckets"] < row["parameters"]
    assert all(push["snapshot"] for push in seen[0]["rows"])


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("value", "is of type str, not a torch tensor"),
        ("meta", "is on the meta device"),
        ("type", "has the type complex64, which cannot be sent"),
        ("twice", "are both the tensor 'model.embed_tokens.weight'"),
        ("unknown", "Tensor 'model.nothing.weight' is not in the engines' model."),
        ("shape", "Tensor 'lm_head.weight' has shape [5, 5], in the engines' model [2048, 128]."),
        ("rank 1", "rank 1 of the trainer: '_orig_mod.lm_head.weight' is of type str"),
        ("order", "rank 1 of the trainer pushes other tensors than rank 0"),
        ("mesh", "other tensors of this push on one of ranks"),
    ],
)
def test_refused_weights_leave_the_fleet_unchanged(four: Seen, case: str, sentence: str) -> None:
    for row in four:
        seen = row["bad"]
        assert sentence in seen["errors"][case], row["rank"]
        assert "Nothing was sent, and the fleet is unchanged." in seen["errors"][case]
        assert (seen["calls"], seen["unchanged"]) == ([], True)


def test_a_failure_reaches_every_rank_and_the_next_push_succeeds(two: Seen) -> None:
    for row in two:
        errors = row["stopped"]["errors"]
        assert "the tensors could not be prepared: out of memory" in errors["leader"]
        assert "rank 1 of the trainer: out of memory" in errors["follower"]
        assert "holds other weights than the trainer says" in errors["fleet"]
        assert (row["stopped"]["version"], row["stopped"]["healed"]) == ("5", True)
    assert "ranks [1] of the trainer did not take part within 1 s" in two[0]["stopped"]["errors"]["absent"]
