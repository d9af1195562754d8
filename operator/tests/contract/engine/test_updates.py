"""Contract of an engine: tensors over a process group."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.support.engine_servers import Peer, Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]


@pytest.mark.parametrize("flat", [False, True])
def test_update_changes_tokens_checksums_and_the_version(engine: Server, joined: Peer, flat: bool) -> None:
    checksum = engine.post("/weights_checker", {"action": "checksum"})[1]["per_engine_checksum"]
    status, body = joined.push(engine, 1.5, {"weight_version": "step-1", "flush_cache": True}, flat=flat)
    message = "Succeeded to update parameter online. Weight version updated to step-1."
    assert (status, body) == (200, {"success": True, "message": message})
    assert engine.post("/end_weight_update", {})[0] == 200
    engine.post("/continue_generation", {})
    after = engine.generate(16)
    assert (engine.label(), after["meta_info"]["weight_version"]) == ("step-1", "step-1")
    updated = engine.post("/weights_checker", {"action": "checksum"})[1]["per_engine_checksum"]
    # The same weights in the other format give the same checksum and tokens.
    engine.post("/begin_weight_update", {})
    status, body = joined.push(engine, 1.5, flat=not flat)
    assert (status, body) == (200, {"success": True, "message": "Succeeded to update parameter online."})
    assert engine.label() == "step-1"
    engine.post("/end_weight_update", {})
    assert engine.post("/weights_checker", {"action": "checksum"})[1]["per_engine_checksum"] == updated
    assert engine.generate(16)["output_ids"] == after["output_ids"]
    engine.post("/begin_weight_update", {})
    joined.push(engine, 0.5 if flat else 0.4, flat=flat)
    engine.post("/end_weight_update", {})
    assert engine.post("/weights_checker", {"action": "checksum"})[1]["per_engine_checksum"] not in (checksum, updated)
    assert engine.generate(16)["output_ids"] != after["output_ids"]


def test_model_keeps_its_types_and_skips_unknown_names(engine: Server, joined: Peer) -> None:
    assert joined.push(engine, 2.0, {"weight_version": "exact"})[0] == 200  # a power of two: the norm's values stay exact in bfloat16
    before = engine.post("/weights_checker", {"action": "checksum"})[1]["ranks"][0]["checksums"]
    assert joined.push(engine, 2.0, names=["model.norm.weight"], dtype="bfloat16")[0] == 200
    after = engine.post("/weights_checker", {"action": "checksum"})[1]["ranks"][0]["checksums"]
    assert after == before  # all values of the norm are equal to 1, so they are the same in the model's own type
    body = joined.describe(names=["lm_head.weight"]) | {"names": ["unknown.weight"], "flush_cache": False}
    asked = engine.later("/update_weights_from_distributed", body)
    assert joined.send() == {"sent": True}
    assert asked.result(30)[0] == 200
    assert engine.post("/weights_checker", {"action": "checksum"})[1]["ranks"][0]["checksums"] == before


def test_wrong_shape_leaves_a_partial_update(engine: Server, joined: Peer) -> None:
    status, body = joined.push(engine, 1.0, names=["model.norm.weight"], shape=[7])
    assert (status, body["success"]) == (400, False)
    assert body["message"].startswith("Failed to update parameter online: ")
    assert body["message"].endswith("The full weights of the ModelRunner are partially updated. Please discard the whole weights.")
    assert joined.push(engine, 1.0)[0] == 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtypes": ["float31"]}, "module 'torch' has no attribute 'float31'"),
        ({"load_format": "flattened_bucket", "names": ["a", "b"]}, "zip() argument 2 is shorter than argument 1"),
        ({"load_format": "flattened_bucket", "names": [], "dtypes": [], "shapes": []}, "Cannot create empty tensor bucket"),
        ({"load_format": "flattened_bucket", "shapes": [[-1]]}, "Negative dimension in received tensor a: torch.Size([-1])"),
        (
            {"load_format": "flattened_bucket", "names": ["a", "b"], "dtypes": ["uint8", "float32"], "shapes": [[1], [1]]},
            "Unaligned received tensor b: byte offset 1, dtype torch.float32",
        ),
    ],
)
def test_invalid_description_is_refused_before_receiving(engine: Server, joined: Peer, change: dict[str, Any], message: str) -> None:
    body = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": joined.group} | change
    answer = engine.post("/update_weights_from_distributed", body)
    assert answer == (400, {"success": False, "message": f"Failed to receive weights: {message}"})
    assert joined.push(engine, 1.0)[0] == 200, "the process group still works"


def test_failed_flush_keeps_the_old_version(engine: Server, trainer: Peer) -> None:
    assert trainer.open([engine])[0][0] == 200
    before = engine.label()
    running = engine.start_long()
    engine.post("/pause_generation", {"mode": "in_place"})
    engine.post("/begin_weight_update", {})
    status, body = trainer.push(engine, 1.25, {"weight_version": "unflushed", "flush_cache": True})
    assert (status, body["message"].startswith("Weights were updated, but the cache was not flushed because requests")) == (400, True)
    assert engine.label() == before
    engine.post("/end_weight_update", {})
    engine.post("/continue_generation", {})
    assert [span["version"] for span in running.result(60)["meta_info"]["weight_versions"]] == [before, "unflushed"]
    assert engine.post("/update_weight_version", {"new_version": "again", "abort_all_requests": False})[0] == 200
    engine.post("/destroy_weights_update_group", {"group_name": trainer.group})
