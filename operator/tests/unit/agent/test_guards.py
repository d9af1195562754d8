"""Refusals of calls that would harm the engine."""

from dataclasses import replace
from typing import Any

import pytest

from sglang_rollout.agent import guards
from sglang_rollout.agent import state as s
from sglang_rollout.agent.interruption import Cause, Interruption
from sglang_rollout.plugin.install import LOADER
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.states import BASE, EngineState

RELEASED_WEIGHTS = Interruption(cause=Cause.RELEASE, released=["weights"])
RELEASED_CACHE = Interruption(cause=Cause.RELEASE, released=["kv_cache"])
CLEAN = s.State(
    record=s.EngineRecord(boot_id="a", state=EngineState.CLEAN, version=BASE, label="base", groups=["g"]), up=True, informed=True
)
DIRTY = replace(CLEAN, record=CLEAN.record.model_copy(update={"state": EngineState.DIRTY, "version": None, "session": True}))
TWO_RANKS = replace(DIRTY, facts=s.EngineFacts(boot_id="a", live_label="base", launch_label="base", tensor_size=2))
ASLEEP = replace(DIRTY, record=DIRTY.record.model_copy(update={"interruption": RELEASED_WEIGHTS}))
EXTERNAL_DRAFT = replace(DIRTY, facts=s.EngineFacts(boot_id="a", live_label="base", launch_label="base", has_external_draft=True))
ONE_RANK: dict[str, Any] = {"serialized_named_tensors": ["AAAA"]}


def with_record(**changes: Any) -> s.State:
    return replace(CLEAN, record=CLEAN.record.model_copy(update=changes))


@pytest.mark.parametrize(
    ("state", "call", "body", "status", "words"),
    [
        (replace(CLEAN, up=False), "flush_cache", {}, 503, "not up"),
        (with_record(pending=ControlCall.INIT_GROUP), ControlCall.PAUSE, {}, 409, "has not answered init_weights_update_group"),
        (DIRTY, ControlCall.CONTINUE, {}, 409, "mixture"),
        (CLEAN, ControlCall.UPDATE_DISTRIBUTED, {"group_name": "g"}, 409, "no session"),
        (DIRTY, ControlCall.UPDATE_DISTRIBUTED, {"group_name": "h"}, 400, "no process group 'h'; its process groups: g"),
        (DIRTY, ControlCall.UPDATE_DISTRIBUTED, {}, 400, "weight_update_group"),
        (CLEAN, ControlCall.UPDATE_TENSOR, ONE_RANK, 409, "no session"),
        (DIRTY, ControlCall.UPDATE_TENSOR, ONE_RANK | {"load_format": "mine.loader"}, 400, "load_format 'mine.loader' may end"),
        (DIRTY, ControlCall.UPDATE_TENSOR, ONE_RANK | {"load_format": LOADER}, 403, "only the engine's agent"),
        (DIRTY, ControlCall.UPDATE_TENSOR, {}, 400, "each of the engine's 1 ranks"),
        (TWO_RANKS, ControlCall.UPDATE_TENSOR, ONE_RANK, 400, "each of the engine's 2 ranks"),
        (ASLEEP, ControlCall.UPDATE_TENSOR, ONE_RANK, 409, "resume_memory_occupation comes first"),
        (CLEAN, ControlCall.END_UPDATE, {}, 400, "no weight update session"),
        (CLEAN, ControlCall.INIT_GROUP, {"group_name": "g"}, 400, "already"),
        (CLEAN, ControlCall.INIT_GROUP, {"group_name": ""}, 400, "needs a name"),
        (CLEAN, ControlCall.RESUME_MEMORY, {"tags": ["weights"]}, 409, "weights is not released"),
        (CLEAN, ControlCall.RESUME_MEMORY, {}, 409, "nothing is not released"),
        (EXTERNAL_DRAFT, ControlCall.UPDATE_DISK, {"model_path": "/v"}, 400, "draft model"),
        (CLEAN, ControlCall.BEGIN_UPDATE, {"selector": "draft"}, 400, "selector 'draft'"),
        (DIRTY, ControlCall.UPDATE_DISTRIBUTED, {"group_name": "g", "selector": "draft"}, 400, "selector 'draft'"),
        (DIRTY, ControlCall.UPDATE_TENSOR, ONE_RANK | {"selector": "draft"}, 400, "selector 'draft'"),
        (CLEAN, ControlCall.CHECK_WEIGHTS, {"selector": ["all"]}, 400, "selector ['all']"),
        (CLEAN, ControlCall.LOAD_ADAPTER, {"lora_name": "a", "lora_path": "/caf\udce9"}, 400, "lora_path holds half of a character"),
    ],
)
def test_refused(state: s.State, call: str, body: dict[str, Any], status: int, words: str) -> None:
    refused = guards.refusal(state, call, body)
    assert refused is not None
    assert refused.status == status
    assert words in refused.message


@pytest.mark.parametrize(
    ("state", "call", "body"),
    [
        (CLEAN, ControlCall.CONTINUE, {}),
        (CLEAN, ControlCall.BEGIN_UPDATE, {}),
        (DIRTY, ControlCall.BEGIN_UPDATE, {}),
        (DIRTY, ControlCall.UPDATE_DISTRIBUTED, {"group_name": "g"}),
        (DIRTY, ControlCall.UPDATE_TENSOR, ONE_RANK | {"load_format": None}),
        (TWO_RANKS, ControlCall.UPDATE_TENSOR, {"serialized_named_tensors": ["AAAA", "BBBB"], "load_format": "flattened_bucket"}),
        (DIRTY, ControlCall.END_UPDATE, {}),
        (CLEAN, ControlCall.INIT_GROUP, {"group_name": "new"}),
        (with_record(interruption=RELEASED_CACHE), ControlCall.RESUME_MEMORY, {}),
    ],
)
def test_allowed(state: s.State, call: str, body: dict[str, Any]) -> None:
    assert guards.refusal(state, call, body) is None


def test_the_agent_itself_may_use_the_loader_of_staged_versions() -> None:
    body = ONE_RANK | {"load_format": LOADER}
    assert guards.refusal(DIRTY, ControlCall.UPDATE_TENSOR, body, is_activation=True) is None
    for state, given in ((CLEAN, body), (ASLEEP, body), (TWO_RANKS, body)):
        assert guards.refusal(state, ControlCall.UPDATE_TENSOR, given, is_activation=True) is not None


def test_bodies_are_prepared_for_sglang() -> None:
    record = s.EngineRecord(interruption=RELEASED_CACHE)
    assert (
        guards.prepare_body(ControlCall.SET_VERSION, {"new_version": "7", "abort_all_requests": True}, record, None)["abort_all_requests"]
        is False
    )
    assert guards.prepare_body(ControlCall.RESUME_MEMORY, {"tags": None}, record, None) == {"tags": ["kv_cache"]}
    assert guards.prepare_body(ControlCall.RELEASE_MEMORY, {}, record, None) == {"tags": ["weights", "cuda_graph"]}, (
        "not what is released already"
    )
    assert guards.prepare_body(ControlCall.PAUSE, {"mode": "retract"}, record, None) == {"mode": "retract"}


@pytest.mark.parametrize(
    "call", [ControlCall.BEGIN_UPDATE, ControlCall.UPDATE_DISTRIBUTED, ControlCall.UPDATE_TENSOR, ControlCall.CHECK_WEIGHTS]
)
def test_a_draft_model_with_weights_of_its_own_is_never_written(call: ControlCall) -> None:
    for given in ({}, {"selector": "all"}, {"selector": "target"}):
        assert guards.prepare_body(call, {"x": 1, **given}, s.EngineRecord(), EXTERNAL_DRAFT.facts) == {"x": 1, "selector": "target"}
    # Without a draft model, or with its layers in the checkpoint, SGLang's default is right, and earlier releases know no selector.
    for facts in (None, TWO_RANKS.facts):
        assert guards.prepare_body(call, {"x": 1}, s.EngineRecord(), facts) == {"x": 1}
    assert "selector" not in guards.prepare_body(ControlCall.END_UPDATE, {}, s.EngineRecord(), EXTERNAL_DRAFT.facts)
