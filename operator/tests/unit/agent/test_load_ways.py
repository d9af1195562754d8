"""What an agent checks before its engine loads a staged version as a folder: wrong files and shapes end the engine's process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.agent.engine import Engine
from sglang_rollout.agent.own_model import OwnModel
from sglang_rollout.agent.staged.verdicts import VerdictFolder
from sglang_rollout.agent.staged.ways import choose_way, find_file_problem, find_other_shapes
from sglang_rollout.plugin.install import LOADER
from sglang_rollout.staging.copies import Copy
from sglang_rollout.wire.reasons import RefusalCode
from sglang_rollout.wire.staged import Shard, StagedTensor
from tests.support.staged import fill, open_copy, random_version, shard


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    shards = [shard(5, 7), shard(9, first=2)]
    return fill(open_copy(tmp_path), shards, random_version(shards))


def test_a_complete_copy_has_no_problem(copy: Copy) -> None:
    assert find_file_problem(copy) == ""


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "bytes, not"),
        (lambda file: file.write_bytes(file.read_bytes() + b"x"), "bytes, not"),
        (lambda file: file.write_bytes(file.read_bytes().replace(b"layer.2", b"layer.3")), "another header"),
        (lambda file: file.unlink(), "cannot be read"),
        (lambda file: file.with_name("model.safetensors").touch(), "no file of the version"),
        (lambda file: file.with_name("model.safetensors.index.json").touch(), "no file of the version"),
    ],
    ids=["short", "long", "header", "missing", "other-file", "other-index"],
)
def test_a_folder_that_is_not_the_version_is_found(copy: Copy, change: Callable[[Path], Any], problem: str) -> None:
    change(copy.folder / "00001.safetensors")
    assert problem in find_file_problem(copy)


def test_shapes_are_compared_where_the_model_has_them() -> None:
    def problems(shape: list[int], expected: list[int] | None) -> list[str]:
        return find_other_shapes([Shard(tensors=[StagedTensor(name="a", dtype="F32", shape=shape)])], {"a": expected})

    assert problems([2, 3], [2, 3]) == problems([2, 3], None) == []
    assert problems([], [1]) == [], "SGLang takes a scalar in any shape"
    assert problems([3, 2], [2, 3]) == ["Tensor a has shape [3, 2], expected [2, 3]."]
    assert problems([6], [2, 3])
    assert problems([1, 6], [6]), "SGLang compares all dimensions"
    assert find_other_shapes([shard(4)], {}) == [], "a name that the model has in another form is not compared"


EXTERNAL_DRAFT = {"model_path": "/m", "speculative_draft_model_path": "/draft"}


@pytest.mark.parametrize(
    ("data_size", "info", "code"),
    [
        (1, {"dp_size": 1, "custom_weight_loader": [LOADER]}, None),
        (1, {"dp_size": 4, "enable_dp_attention": True, "custom_weight_loader": [LOADER]}, None),
        (1, {"dp_size": 2, "custom_weight_loader": [LOADER]}, RefusalCode.NOT_OFFERED),
        (1, {"dp_size": 1, "custom_weight_loader": []}, RefusalCode.NOT_OFFERED),
        (2, {"dp_size": 2, "custom_weight_loader": []}, None),
        (2, {"dp_size": 1, "custom_weight_loader": [LOADER]}, RefusalCode.NOT_OFFERED),
        (1, {"dp_size": 1, "custom_weight_loader": [LOADER], **EXTERNAL_DRAFT}, None),
        (2, {"dp_size": 2, **EXTERNAL_DRAFT}, RefusalCode.NOT_OFFERED),
        (2, {"dp_size": 2, "model_path": "/m", "speculative_draft_model_path": "/m"}, None),
    ],
)
async def test_an_engine_with_other_replicas_is_not_asked_to_load(
    tmp_path: Path, data_size: int, info: dict[str, Any], code: RefusalCode | None
) -> None:
    async with Engine("http://127.0.0.1:1") as engine:
        refused = choose_way(OwnModel(engine, None), VerdictFolder(tmp_path), data_size=data_size).engine_refusal(info)
    assert (refused and refused.code) == code
    advice = (f"--data-size {info['dp_size']}", "--custom-weight-loader", "--speculative-draft-model-path")
    assert refused is None or any(flag in refused.message for flag in advice)
