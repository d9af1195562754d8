"""Contract of an engine: checksums, memory, weights on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.engine import environment

from tests.contract.support.engine_servers import Peer, Server, refused

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]


def test_checksums(engine: Server) -> None:
    status, body = engine.post("/weights_checker", {"action": "checksum"})
    assert (status, set(body)) == (200, {"success", "message", "ranks", "per_engine_checksum"})
    assert (body["success"], body["message"]) == (True, "Success.")
    (rank,) = body["ranks"]
    assert set(rank) == {"checksums", "per_gpu_checksum", "parallelism_info"}
    assert rank["parallelism_info"] == [
        {"role": "target", "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1, "rank": 0, "size": 1}
    ]
    assert {len(value) for value in rank["checksums"].values()} == {16}
    assert (len(rank["per_gpu_checksum"]), len(body["per_engine_checksum"])) == (64, 64)
    assert engine.post("/weights_checker") == engine.get("/weights_checker") == (200, body)
    assert engine.post("/weights_checker", {"action": "bogus"}) == (400, {"success": False, "message": "Unsupported action='bogus'"})


def test_memory_is_released_and_resumed(engine: Server) -> None:
    for tags in ({"tags": ["kv_cache"]}, {"tags": ["weights", "kv_cache"]}, {}):
        assert engine.post("/release_memory_occupation", tags) == (200, None)
        assert engine.post("/resume_memory_occupation", tags) == (200, None)
    assert engine.generate(2)["meta_info"]["completion_tokens"] == 2


def test_update_from_disk(engine: Server, trainer: Peer, tmp_path: Path) -> None:
    before = engine.generate(16)["output_ids"]
    (tmp_path / "config.json").write_text((environment.model() / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((environment.model() / name).read_bytes())
    trainer.save(0.6, tmp_path)
    label = engine.label()
    status, body = engine.post("/update_weights_from_disk", {"model_path": str(tmp_path)})
    assert (status, body) == (200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})
    info = engine.get("/model_info")[1]
    assert (info["weight_version"], info["model_path"], info["served_model_name"]) == (label, str(tmp_path), str(tmp_path))
    assert engine.generate(16)["output_ids"] != before
    status, body = engine.post("/update_weights_from_disk", {"model_path": str(environment.model()), "weight_version": "disk"})
    assert (status, body["message"]) == (200, "Succeeded to update model weights. Weight version updated to disk.")
    assert (engine.label(), engine.get("/v1/models")[1]["data"][0]["id"]) == ("disk", str(environment.model()))


def test_update_from_a_folder_without_weights_changes_nothing(engine: Server, tmp_path: Path) -> None:
    before = engine.generate(8)["output_ids"], engine.label()
    for path in ("/nonexistent", str(tmp_path)):
        status, body = engine.post("/update_weights_from_disk", {"model_path": path, "weight_version": "never"})
        assert (status, body["success"], body["num_paused_requests"]) == (400, False, 0)
        assert body["message"].startswith("Failed to get weights iterator: ")
    assert (engine.generate(8)["output_ids"], engine.label()) == before
    refused(engine.post("/update_weights_from_disk", {}), "model_path")
