from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.trainer.tensors import TensorSpec, plan_buckets

SIZES = {"uint8": 1, "bfloat16": 2, "float32": 4, "float64": 8}
specs = st.lists(st.tuples(st.sampled_from(sorted(SIZES)), st.lists(st.integers(1, 9), max_size=3)), max_size=30).map(
    lambda rows: [TensorSpec(f"t{i}", dtype, tuple(shape), SIZES[dtype]) for i, (dtype, shape) in enumerate(rows)]
)


def named(*tensors: TensorSpec) -> list[tuple[TensorSpec, str]]:
    return [(spec, spec.name) for spec in tensors]


def floats(name: str, number: int) -> TensorSpec:
    return TensorSpec(name, "float32", (number,), 4)


@given(specs, st.integers(1, 400))
def test_any_plan_keeps_order_limit_and_alignment(tensors: list[TensorSpec], limit: int) -> None:
    buckets = list(plan_buckets(named(*tensors), limit))
    assert [spec for bucket in buckets for spec, _ in bucket.items] == tensors
    assert [bucket.last for bucket in buckets] == [False] * (len(buckets) - 1) + [True] * bool(buckets)
    for bucket in buckets:
        assert bucket.nbytes <= limit or len(bucket.items) == 1
        assert bucket.nbytes == sum(spec.nbytes for spec, _ in bucket.items)
        for offset, spec, _ in bucket.placed_items():
            assert offset % spec.itemsize == 0


def test_a_tensor_that_would_be_misaligned_starts_a_bucket() -> None:
    odd = TensorSpec("odd", "bfloat16", (3,), 2)
    assert [len(b.items) for b in plan_buckets(named(odd, floats("after", 1), floats("last", 1)), 1000)] == [1, 2]


def test_a_tensor_above_the_limit_gets_its_own_bucket() -> None:
    buckets = list(plan_buckets(named(floats("a", 1), floats("huge", 100), floats("b", 1)), 16))
    assert [[name for _, name in bucket.items] for bucket in buckets] == [["a"], ["huge"], ["b"]]


def test_planning_reads_at_most_one_tensor_ahead() -> None:
    read: list[str] = []

    def gather() -> Iterator[tuple[TensorSpec, str]]:
        for i in range(10):
            read.append(f"t{i}")
            yield floats(f"t{i}", 1), f"t{i}"

    next(plan_buckets(gather(), 8))
    assert read == ["t0", "t1", "t2"]


def test_a_bucket_is_described_in_sglangs_format() -> None:
    (bucket,) = plan_buckets(named(TensorSpec("w", "bfloat16", (2, 3), 2), floats("norm", 4)), 1000)
    assert bucket.request("g") == {
        "names": ["w", "norm"],
        "dtypes": ["bfloat16", "float32"],
        "shapes": [[2, 3], [4]],
        "group_name": "g",
        "load_format": "flattened_bucket",
    }


@pytest.mark.parametrize(
    ("tensors", "limit", "sentence"),
    [
        ([floats("w", 1), floats("w", 1)], 100, "appears twice"),
        ([floats("w", 0)], 100, "no bytes to send"),
        ([floats("w", 1)], 0, "must be positive"),
    ],
)
def test_a_tensor_that_cannot_be_sent_is_refused(tensors: list[TensorSpec], limit: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        list(plan_buckets(named(*tensors), limit))


def test_a_scalar_has_the_bytes_of_one_element() -> None:
    assert TensorSpec("step", "float32", (), 4).nbytes == 4


def test_the_package_imports_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import sglang_rollout.trainer"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
