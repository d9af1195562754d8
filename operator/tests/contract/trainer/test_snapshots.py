"""A snapshot that the client writes is a checkpoint that the real engine loads."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from e2e.child import start_child
from e2e.engine import Engine, LabError, environment, start_engine

from sglang_rollout.agent.checkpoint import check
from sglang_rollout.agent.engine_model import EngineModel
from sglang_rollout.checkpoints.snapshots import latest_snapshot, list_snapshots, verify_snapshot
from tests.contract.support.local_fleet import wait_serving
from tests.contract.trainer.test_client import engine_python
from tests.support.paths import TRAINERS
from tests.support.ports import free_port

pytestmark = [pytest.mark.router, pytest.mark.engine, pytest.mark.timeout(600)]
PROMPT = [11, 12, 13, 14]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[tuple[Engine, str]]:
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    with start_engine(free_port()) as engine:
        address, log = f"127.0.0.1:{free_port()}", tmp_path / "local.log"
        command = [sys.executable, "-m", "sglang_rollout.cli", "local", "--engine", engine.url, "--listen", address, "--backend", "gloo"]
        with log.open("wb") as out:
            local = start_child(command, stdout=out, stderr=out)
        try:
            wait_serving(f"http://{address}", 1, 90, local, log)
            yield engine, f"http://{address}"
        finally:
            local.send_signal(signal.SIGTERM)
            local.wait(30)


def greedy(engine: Engine, tokens: int) -> list[int]:
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    reply = requests.post(f"{engine.url}/generate", json={"input_ids": PROMPT, "sampling_params": params}, timeout=60)
    found: list[int] = reply.json()["output_ids"]
    return found


def load(engine: Engine, path: Path) -> None:
    reply = requests.post(f"{engine.url}/update_weights_from_disk", json={"model_path": str(path)}, timeout=60)
    assert reply.ok, reply.text


def test_an_engine_loads_a_snapshot(fleet: tuple[Engine, str], tmp_path: Path) -> None:
    engine, url = fleet
    base, directory = environment.model(), tmp_path / "snapshots"
    out = engine_python(str(TRAINERS / "client_cases.py"), "snapshots", url, str(base), str(base), str(directory), seconds=240)
    seen = json.loads(out.splitlines()[-1])
    assert (seen["labels"], seen["same"], seen["files"]) == (["step 1", "step 2", "step 3"], True, 2)
    assert [snapshot.manifest.label for snapshot in list_snapshots(directory)] == ["step 2", "step 3"]
    newest = latest_snapshot(directory)
    assert newest is not None
    assert str(newest.path) == seen["path"]
    verify_snapshot(newest)
    verdict = check(str(newest.path), EngineModel(str(base)))
    assert (verdict.refusal, verdict.compared) == (None, True)
    load(engine, base)
    assert greedy(engine, len(seen["tokens"])) != seen["tokens"]
    load(engine, newest.path)
    assert greedy(engine, len(seen["tokens"])) == seen["tokens"]
