"""Headers that would keep the process busy. An agent that is silent for 2 s loses its gate."""

from __future__ import annotations

import json
import time
from contextlib import suppress

import pytest

from sglang_rollout.agent.staged.ways import find_other_shapes
from sglang_rollout.checkpoints.format import MAX_LENGTH, FormatError, parse_header
from sglang_rollout.coordinator.update.sources import count_bytes as count_call
from sglang_rollout.coordinator.update.staging import count_bytes as count_shards
from sglang_rollout.staging.index import StagedError, tensor_bytes
from sglang_rollout.wire.reasons import RefusedError
from sglang_rollout.wire.staged import Shard, StagedTensor

LONG = int("9" * 4299)
SECONDS = 2.0
"""Limit of the CPU time of each call. Without bounds, 500 lengths of 4,299 digits took 5 s."""


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


LONG_NAME = "x" * 1_000_000


@pytest.mark.parametrize(
    "header",
    [
        b'{"a": {"dtype": "U8", "shape": [1' + b"0" * 400 + b'], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "U8", "shape": [' + b",".join([b"9" * 4299] * 930) + b'], "data_offsets": [0, 4]}}',
        b'{"a": ' + b"[" * 4_000_000,
        b"{" + b",".join(b'"%d": {"dtype": "U8", "shape": [9], "data_offsets": [0, 4]}' % number for number in range(2_000)) + b"}",
        json.dumps({LONG_NAME: {"dtype": "U8", "shape": [3], "data_offsets": [0, 4]}}).encode(),
        json.dumps({LONG_NAME: {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}).encode(),
        json.dumps({LONG_NAME: {"dtype": LONG_NAME, "shape": [4], "data_offsets": [0, 4]}}).encode(),
        json.dumps({LONG_NAME: 4}).encode(),
    ],
    ids=["10^400", "4 MB of digits", "nested", "many", "long name", "hole", "long type", "no entry"],
)
def test_a_hostile_header_is_refused_at_once_in_a_short_sentence(header: bytes) -> None:
    began = time.process_time()
    with pytest.raises(FormatError) as refused:
        parse_header(header)
    assert time.process_time() - began < SECONDS
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("shape", [[LONG] * 1000, [2**62] * 20_000, [2**53] * 64, [2**52] * 64])
def test_the_bytes_of_announced_tensors_are_counted_at_once(shape: list[int]) -> None:
    began = time.process_time()
    count_call({"names": ["a"], "dtypes": ["float32"], "shapes": [shape]})
    with suppress(RefusedError):
        count_shards([Shard.model_construct(tensors=[StagedTensor.model_construct(name="a", dtype="F32", shape=shape)])])
    assert time.process_time() - began < SECONDS


@pytest.mark.parametrize("listed", [[LONG] * 1000, [2**62] * 20_000, [1] * 16])
def test_shapes_that_an_engine_lists_are_compared_at_once(listed: list[int]) -> None:
    """The list comes from a file that the engine writes."""
    shards = [Shard.model_construct(tensors=[StagedTensor(name="a", dtype="F32", shape=[1])])]
    began = time.process_time()
    problems = find_other_shapes(shards, {"a": listed})
    assert time.process_time() - began < SECONDS
    assert bool(problems) is (set(listed) != {1})


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
