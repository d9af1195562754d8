"""Contract of an engine: calls that end the server."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import requests
from e2e.engine import environment

from tests.contract.support.engine_servers import Server, sglang, stand_in
from tests.support.ports import free_port

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
    ],
    ids=["truncated-file", "wrong-shape", "resume-unreleased"],
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


@pytest.mark.parametrize("body", [{"input_ids": [99999]}, {"text": ""}], ids=["token-outside-vocabulary", "empty-prompt"])
@pytest.mark.parametrize("kind", ["stand-in", pytest.param("sglang", marks=pytest.mark.long)])
def test_requests_that_end_a_server_without_the_plug_in(
    engine_environment: None, tmp_path: Path, kind: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the plug-in is for. SGLANG_PLUGINS names the plug-ins that SGLang loads."""
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    made = stand_in(free_port(), tmp_path / "log", "--no-plugin") if kind == "stand-in" else sglang(free_port(), tmp_path / "log")
    made.start()
    try:
        made.wait()
        with pytest.raises(requests.ConnectionError):
            requests.post(f"{made.url}/generate", json={**body, "sampling_params": {"max_new_tokens": 1}}, timeout=60)
    finally:
        made.kill()
