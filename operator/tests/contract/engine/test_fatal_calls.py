"""Contract of an engine: calls that end the server."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import requests
from e2e.engine import environment

from tests.contract.support.engine_servers import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]


def truncated(folder: Path) -> dict[str, Any]:
    whole = (environment.model() / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    return {"model_path": str(folder)}


def misshapen(folder: Path) -> dict[str, Any]:
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [7], "data_offsets": [0, 28]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(28))
    return {"model_path": str(folder)}


@pytest.mark.parametrize(
    ("path", "make"),
    [
        pytest.param("/update_weights_from_disk", truncated, marks=pytest.mark.long),
        pytest.param("/update_weights_from_disk", misshapen, marks=pytest.mark.long),
        pytest.param("/resume_memory_occupation", lambda _: {"tags": ["weights"]}, marks=pytest.mark.long),
        ("/generate", lambda _: {"input_ids": [99999], "sampling_params": {"max_new_tokens": 1}}),
        ("/generate", lambda _: {"text": "", "sampling_params": {"max_new_tokens": 1}}),
    ],
    ids=["truncated-file", "wrong-shape", "resume-unreleased", "token-outside-vocabulary", "empty-prompt"],
)
def test_calls_that_end_the_server(engine: Server, path: str, make: Any, tmp_path: Path) -> None:
    """A restarted server has base weights, the base version and another identity."""
    (tmp_path / "config.json").write_text((environment.model() / "config.json").read_text())
    before = engine.get("/server_info")[1]
    engine.post("/update_weight_version", {"new_version": "lost"})
    with pytest.raises(requests.ConnectionError):
        engine.ask("POST", path, make(tmp_path), timeout=60)
    assert engine.has_ended()
    engine.restart()
    after = engine.get("/server_info")[1]
    assert engine.label() == "base"
    assert (after["random_seed"], after["startup_time"]) != (before["random_seed"], before["startup_time"])
