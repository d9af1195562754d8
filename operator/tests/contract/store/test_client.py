"""The client library's uploads, from torch's tensors to the files of the real weight store."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from e2e.engine import environment

from tests.contract.support.fake_coordinator import FakeCoordinator, fake_coordinator
from tests.contract.support.store_process import StoreProcess
from tests.support.paths import TRAINERS, package_variables

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

BYTES = 2 * 4 * (3 << 20) + 2 * (3 << 20) + 4 + 3 + 40


@pytest.fixture
def fleet(engine_environment: None, upload_store: StoreProcess) -> Iterator[FakeCoordinator]:
    with fake_coordinator(upload_store) as made:
        yield made


def run(case: str, fleet: FakeCoordinator) -> dict[str, Any]:
    command = [str(environment.python(make=False)), str(TRAINERS / "upload_cases.py"), case, fleet.url]
    done = subprocess.run(command, env=package_variables(), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(("case", "label", "state"), [("push", "one", "committed"), ("iterator", "2", "staged")])
def test_the_store_holds_what_the_trainer_pushed(fleet: FakeCoordinator, case: str, label: str, state: str) -> None:
    seen = run(case, fleet)
    assert [fleet.store.data_digest(fleet.update, shard) for shard in range(2)] == seen.pop("digests")
    assert seen == {"bytes": BYTES, "shards": 2, "state": state, "version": label, "world": 1}
    assert fleet.committed["label"] == label
    assert fleet.store.is_complete(fleet.update)
    assert fleet.deleted == []


def test_an_upload_that_fails_is_deleted_and_the_version_before_it_stays(fleet: FakeCoordinator) -> None:
    run("push", fleet)
    before = fleet.store.updates()
    seen = run("failing", fleet)
    assert seen["phase"] == "prepare"
    assert "a rank of the trainer is gone. Push again. The engines serve the previous version." in seen["message"]
    assert len(fleet.deleted) == 1
    assert fleet.store.updates() == before


def test_a_model_above_the_limit_is_refused_with_both_numbers(fleet: FakeCoordinator) -> None:
    fleet.size_limit = 1000
    seen = run("refused", fleet)
    assert seen["phase"] == "begin"
    assert "1000 bytes" in seen["message"]
    assert str(BYTES - 40) in seen["message"], "the first shard alone is too large"
    assert fleet.store.updates() == {}
