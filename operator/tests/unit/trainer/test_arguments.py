"""A wrong argument of the client is refused before the first call to the fleet, by the rules of the fleet's URL."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from sglang_rollout.coordinator.http import dialects
from sglang_rollout.trainer import Fleet, FleetError, PushFailed, Snapshots, connect
from sglang_rollout.trainer.calls import Http
from sglang_rollout.wire.reasons import RefusedError
from tests.unit.trainer.support.scripted_fleet import FakeFleet
from tests.unit.trainer.test_push import Tensor

HALF = "a\ud83d"
FLAGS: list[Any] = [1, None, "no"]
WAITS: list[Any] = ["loaded", None, True, []]
LABELS: list[Any] = ["5\n", "x" * 300, "", HALF, "a\u2028", True, False, 5.0, math.nan, -1, 10**400, None, [], b"5"]
NUMBERS: list[Any] = [0, -1, True, "5", math.nan, None, [], 10**30, math.inf]
TENSORS: list[Any] = [
    *(None, "abc", 5, {}, [], [("a",)], [5], {"": Tensor((1,))}, {5: Tensor((1,))}, {HALF: Tensor((1,))}, {"a\n": Tensor((1,))}),
    *({"x" * 2000: Tensor((1,))}, {"a": [1.0]}, {"a": Tensor((0,))}, {"a": Tensor((1,), "torch.complex64")}),
    *([("a", Tensor((1,))), ("a", Tensor((1,)))], {"a": Tensor((1,)), "a._orig_mod": Tensor((1,))}),
]
GOOD = {"a": Tensor((1,))}
SPECS: list[Any] = ["a", 5, [("a",)], [("", (1,), "float32")], [(5, (1,), "float32")], [("a", "1", "float32")], [("a", (-1,), "float32")]]
SPECS += [[("a", (True,), "float32")], [("a", (1.5,), "float32")], [("a", (1,), "text")], [("a", None, "float32")]]
CHECKSUMS: list[Any] = [
    5,
    "a",
    {"x": ["a"]},
    {0: []},
    {-1: ["a"]},
    {True: ["a"]},
    {1: "a"},
    {1: [5]},
    {2: ["a"]},
    {1: [HALF]},
    {10**9: ["a"]},
]
PUSHES: list[dict[str, Any]] = [
    *({"version": label} for label in LABELS),
    *({"timeout": number} for number in NUMBERS),
    *({"bucket_bytes": number} for number in [*NUMBERS[:7], 1.5]),
    *({"named_tensors": tensors} for tensors in TENSORS),
    *({"specs": specs} for specs in SPECS),
    *({"checksums": checksums} for checksums in CHECKSUMS),
    *({"snapshot": value} for value in (1, "yes", True)),
    *({"check_model": value} for value in FLAGS),
    *({"wait": value} for value in WAITS),
]


@pytest.mark.parametrize("wrong", PUSHES, ids=repr)
def test_a_push_checks_every_argument_before_it_calls_the_fleet(fake: FakeFleet, wrong: Mapping[str, Any]) -> None:
    arguments = {"named_tensors": GOOD, "version": 1, **wrong}
    with pytest.raises((ValueError, PushFailed)) as failure:
        Fleet(Http(fake.url)).push(**arguments)
    assert "\ud83d" not in str(failure.value).replace(repr(HALF), "")
    assert fake.calls == []
    if isinstance(failure.value, PushFailed):
        assert failure.value.phase == "prepare"


GENERATE: list[dict[str, Any]] = [
    *({"timeout": number} for number in NUMBERS),
    *({"concurrency": number} for number in [*NUMBERS[:7], 1.5]),
    *({"return_logprob": value} for value in (1, None, "yes", [True])),
    *({"n": value} for value in (0, -1, True, 1.5, math.nan, 10**30)),
    {"prompts": [HALF]},
    *({"prompts": None, "input_ids": [[token]]} for token in (-1, 2**31, True, 1.5, "5", None)),
]


@pytest.mark.parametrize("wrong", GENERATE, ids=repr)
def test_generate_checks_every_argument_before_it_calls_the_fleet(fake: FakeFleet, wrong: Mapping[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Fleet(Http(fake.url)).generate(**{"prompts": ["a"], **wrong})
    assert fake.calls == []


@pytest.mark.parametrize(
    "wrong",
    [*({"timeout": number} for number in NUMBERS), {"backend": ""}, {"backend": 5}, {"host": "a\n"}, {"host": HALF}, {"device": 0}],
    ids=repr,
)
def test_opening_a_group_checks_its_arguments(fake: FakeFleet, wrong: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match="Nothing was sent"):
        Fleet(Http(fake.url)).open_group(**wrong)
    assert fake.calls == []


@pytest.mark.parametrize(
    "wrong",
    [
        *({"timeout": number} for number in NUMBERS),
        *({"url": url} for url in (None, "", 5, "demo-router:30000", "http://a\n")),
        *({"token": token} for token in ("", "a\n", 5, "é", HALF)),
        *({"ca": "/no/such/file"}, {"snapshots": "/ckpt"}, {"delta": 1}),
    ],
    ids=repr,
)
def test_connecting_checks_its_arguments_at_once(fake: FakeFleet, wrong: Mapping[str, Any]) -> None:
    with pytest.raises((ValueError, FleetError)):
        connect(**{"url": fake.url, **wrong})
    assert fake.calls == []


@pytest.mark.parametrize("name", ["every", "keep", "shard_bytes", "deadline"])
@pytest.mark.parametrize("number", NUMBERS[:7], ids=repr)
def test_snapshots_check_their_numbers(tmp_path: Any, name: str, number: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=name):
        Snapshots(tmp_path / "out", model=tmp_path, **{name: number})


UPDATE = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}
CALLS: list[tuple[Callable[[dict[str, Any]], object], dict[str, Any], str]] = [
    (dialects.begin, {}, "weight_version"),
    (dialects.update, UPDATE, "weight_version"),
    (dialects.set_label, {}, "new_version"),
    (dialects.from_disk, {"model_path": "/ckpt"}, "weight_version"),
    (dialects.tensors, {"serialized_named_tensors": ["AAAA"]}, "weight_version"),
    (dialects.upload, {"shards": [{"tensors": [{"name": "a", "dtype": "F32", "shape": [1]}]}]}, "label"),
]


@pytest.mark.parametrize("label", [label for label in LABELS if label not in ("", None)], ids=repr)
@pytest.mark.parametrize(("parse", "body", "field"), CALLS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_url_refuses_the_same_labels_in_every_call(
    parse: Callable[[dict[str, Any]], object], body: dict[str, Any], field: str, label: object
) -> None:
    with pytest.raises(RefusedError):
        parse({**body, field: label})


@pytest.mark.parametrize(
    "wrong",
    [
        *({"names": [name]} for name in ("", 5, None, "a\n", HALF, "x" * 2000)),
        {"names": ["a", "a"], "dtypes": ["float32"] * 2, "shapes": [[1], [1]]},
        *({"dtypes": [dtype]} for dtype in ("", 5, None, "text", "F32")),
        *({"shapes": [shape]} for shape in ([-1], [True], [1.5], ["1"], "1", 5, None, [1] * 65, [10**30])),
        *({flag: 5} for flag in ("flush_cache", "abort_all_requests", "torch_empty_cache")),
        {"flush_cache": None},
    ],
    ids=repr,
)
def test_the_url_refuses_wrong_tensors_before_any_engine_is_called(wrong: dict[str, Any]) -> None:
    with pytest.raises(RefusedError):
        dialects.update({**UPDATE, **wrong})


@pytest.mark.parametrize("checksums", [each for each in CHECKSUMS if not isinstance(each, dict) or all(isinstance(k, str) for k in each)])
def test_the_url_refuses_the_same_checksums(checksums: object) -> None:
    with pytest.raises(RefusedError):
        dialects.end({"checksums": checksums})


def test_right_arguments_pass_at_the_url() -> None:
    assert dialects.begin({"weight_version": 7}).label == "7"
    assert dialects.begin({}).label is None
    assert dialects.update({**UPDATE, "dtypes": ["torch.bfloat16"], "shapes": [[]], "weight_version": "Schritt é"})
