"""Headers that would keep the process busy. An agent that is silent for 2 s loses its gate."""

from __future__ import annotations

import json
import time

import pytest

from sglang_rollout.checkpoints.format import MAX_LENGTH, FormatError, parse_header
from sglang_rollout.staging.index import StagedError, tensor_bytes
from sglang_rollout.wire.staged import StagedTensor

LONG = int("9" * 4299)
SECONDS = 0.5


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [
        ([LONG] * 500, [0, 4]),
        ([LONG] * 500, [0, LONG]),
        ([2**62] * 20_000, [0, 4]),
        ([2**62] * 20_000, [0, 2**63 - 1]),
        ([2] * 500_000, [0, 4]),
        ([2**63], [0, 2**63]),
        ([3], [2**63, 2**63 + 3]),
        ([3, -1], [0, 3]),
    ],
    ids=["digits", "digits and offsets", "lengths", "lengths and offsets", "dimensions", "length", "offset", "negative"],
)
def test_a_hostile_shape_is_refused_at_once(shape: list[int], offsets: list[int]) -> None:
    data = json.dumps({"a": {"dtype": "U8", "shape": shape, "data_offsets": offsets}}).encode()
    began = time.process_time()
    with pytest.raises(FormatError) as refused:
        parse_header(data)
    assert time.process_time() - began < SECONDS
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(("shape", "size"), [([], 1), ([0], 0), ([2**40, 2**40, 0], 0), ([2, 3], 6)])
def test_possible_shapes_are_read(shape: list[int], size: int) -> None:
    header = parse_header(json.dumps({"a": {"dtype": "U8", "shape": shape, "data_offsets": [0, size]}}).encode())
    assert header.tensors["a"].end == size
    assert tensor_bytes(StagedTensor(name="a", dtype="U8", shape=shape)) == size


@pytest.mark.parametrize("shape", [[LONG] * 500, [2**62] * 20_000, [MAX_LENGTH + 1], [MAX_LENGTH, 2]])
def test_an_upload_with_a_hostile_shape_is_refused_at_once(shape: list[int]) -> None:
    tensor = StagedTensor.model_construct(name="a", dtype="U8", shape=shape)
    began = time.process_time()
    with pytest.raises(StagedError, match="impossible shape"):
        tensor_bytes(tensor)
    assert time.process_time() - began < SECONDS
