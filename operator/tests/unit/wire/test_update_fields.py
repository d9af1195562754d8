"""One rule for the fields of calls that bring weights: the fleet's URL, agents and staged versions refuse the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from sglang_rollout.agent import guards
from sglang_rollout.agent import state as s
from sglang_rollout.coordinator.http import dialects
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.arguments import find_update_problem
from sglang_rollout.wire.reasons import RefusedError
from sglang_rollout.wire.staged import StagedTensor

TENSORS = {"names": ["w"], "dtypes": ["float32"], "shapes": [[2]]}
RIGHT: dict[ControlCall, dict[str, Any]] = {
    ControlCall.BEGIN_UPDATE: {},
    ControlCall.UPDATE_DISTRIBUTED: {**TENSORS, "group_name": "g"},
    ControlCall.UPDATE_TENSOR: {"serialized_named_tensors": ["x"], "load_format": "direct"},
    ControlCall.UPDATE_DISK: {"model_path": "/checkpoints/7"},
    ControlCall.SET_VERSION: {"new_version": "7"},
}
AT_THE_URL: dict[ControlCall, Callable[[dict[str, Any]], object]] = {
    ControlCall.BEGIN_UPDATE: dialects.begin,
    ControlCall.UPDATE_DISTRIBUTED: dialects.update,
    ControlCall.UPDATE_TENSOR: dialects.tensors,
    ControlCall.UPDATE_DISK: dialects.from_disk,
    ControlCall.SET_VERSION: dialects.set_label,
}
LONG = 1025 * "x"
WRONG: list[tuple[ControlCall, dict[str, Any], str]] = [
    (ControlCall.BEGIN_UPDATE, {"selector": "draft"}, "selector 'draft' is not offered"),
    (ControlCall.BEGIN_UPDATE, {"selector": ["all"]}, "selector ['all'] is not offered"),
    (ControlCall.BEGIN_UPDATE, {"weight_version": "5\n"}, "contains a control character"),
    (ControlCall.UPDATE_DISTRIBUTED, {"selector": "both"}, "selector 'both' is not offered"),
    (ControlCall.UPDATE_DISTRIBUTED, {"load_format": "flatened_bucket"}, "load_format 'flatened_bucket' is not supported"),
    (ControlCall.UPDATE_DISTRIBUTED, {"names": [LONG]}, "names[0] is 1025 characters long"),
    (ControlCall.UPDATE_DISTRIBUTED, {"names": ["a\u2028b"]}, "contains a control character"),
    (ControlCall.UPDATE_DISTRIBUTED, {"shapes": [[-1]]}, "shapes[0] has the size -1"),
    (ControlCall.UPDATE_DISTRIBUTED, {"shapes": [[True]]}, "shapes[0] has the size True"),
    (ControlCall.UPDATE_DISTRIBUTED, {"weight_version": True}, "weight_version True is not a version"),
    (ControlCall.UPDATE_DISTRIBUTED, {"flush_cache": "no"}, "flush_cache 'no' is neither true nor false"),
    (ControlCall.UPDATE_TENSOR, {"selector": "draft"}, "selector 'draft' is not offered"),
    (ControlCall.UPDATE_TENSOR, {"weight_version": 300 * "x"}, "weight_version is 300 characters long"),
    (ControlCall.UPDATE_DISK, {"model_path": "/a\nb"}, "contains a control character"),
    (ControlCall.UPDATE_DISK, {"model_path": 5000 * "x"}, "model_path is 5000 characters long"),
    (ControlCall.UPDATE_DISK, {"weight_version": -1}, "weight_version is negative"),
    (ControlCall.UPDATE_DISK, {"recapture_cuda_graph": 1}, "recapture_cuda_graph 1 is neither true nor false"),
    (ControlCall.SET_VERSION, {"new_version": "a\tb"}, "contains a control character"),
    (ControlCall.SET_VERSION, {"new_version": 1.5}, "new_version 1.5 is not a version"),
]


def at_the_agent(call: ControlCall, body: dict[str, Any]) -> str:
    """Return why an agent refuses a call; empty if it forwards it."""
    state = s.State(record=s.EngineRecord(boot_id="a", session=True, groups=["g"]), up=True, facts=s.EngineFacts("a", "base", "base"))
    refused = guards.refusal(state, call, body)
    return refused.message if refused is not None else ""


@pytest.mark.parametrize("call", RIGHT, ids=str)
def test_right_calls_pass_everywhere(call: ControlCall) -> None:
    body = RIGHT[call] | ({"selector": "all"} if call in (ControlCall.BEGIN_UPDATE, ControlCall.UPDATE_DISTRIBUTED) else {})
    AT_THE_URL[call](body)
    assert at_the_agent(call, body) == ""


@pytest.mark.parametrize(("call", "wrong", "sentence"), WRONG)
def test_wrong_fields_are_refused_at_the_url_and_by_agents(call: ControlCall, wrong: dict[str, Any], sentence: str) -> None:
    body = RIGHT[call] | wrong
    with pytest.raises(RefusedError) as refused:
        AT_THE_URL[call](body)
    assert sentence in str(refused.value)
    assert sentence in at_the_agent(call, body)


def test_fields_that_are_left_out_need_no_value() -> None:
    assert find_update_problem({}) is None
    assert find_update_problem(dict.fromkeys(("weight_version", "new_version", "names", "shapes", "selector", "model_path"))) is None
    assert find_update_problem({"flush_cache": None}) == "flush_cache None is neither true nor false."
    assert find_update_problem({"weight_version": ""}) is None


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"name": LONG}, "name is 1025 characters long"),
        ({"name": ""}, "is not the name of a tensor"),
        ({"name": "a\nb"}, "contains a control character"),
        ({"shape": [-1]}, "shape has the size -1"),
        ({"shape": [True]}, "shape has the size True"),
        ({"shape": [2**53]}, "shape has the size"),
        ({"shape": 65 * [1]}, "use a list of at most 64 sizes"),
    ],
)
def test_tensors_of_staged_versions_have_the_same_rule(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as refused:
        StagedTensor.model_validate({"name": "w", "dtype": "F32", "shape": [2]} | fields)
    assert sentence in str(refused.value)
    shard = {"tensors": [{"name": "w", "dtype": "F32", "shape": [2]} | fields]}
    with pytest.raises(RefusedError) as answered:
        dialects.upload({"shards": [shard]})
    assert sentence in str(answered.value)
    assert "Value error" not in str(answered.value)
