"""Calls that an engine must not be asked for."""

from dataclasses import replace
from typing import Any

import pytest

from sglang_rollout.agent import guards
from sglang_rollout.agent import state as s
from sglang_rollout.wire.weights import BASE, EngineState

CLEAN = s.State(memory=s.Memory(boot_id="a", state=EngineState.CLEAN, version=BASE, label="base", groups=["g"]), up=True, informed=True)
DIRTY = replace(CLEAN, memory=CLEAN.memory.model_copy(update={"state": EngineState.DIRTY, "version": None, "session": True}))
TWO_RANKS = replace(DIRTY, facts=s.EngineFacts(boot_id="a", live_label="base", launch_label="base", tensor_size=2))
ASLEEP = replace(DIRTY, memory=DIRTY.memory.model_copy(update={"released": ["weights"]}))
ONE_RANK: dict[str, Any] = {"serialized_named_tensors": ["AAAA"]}


def with_memory(**changes: Any) -> s.State:
    return replace(CLEAN, memory=CLEAN.memory.model_copy(update=changes))


@pytest.mark.parametrize(
    ("state", "call", "body", "status", "words"),
    [
        (replace(CLEAN, up=False), "flush_cache", {}, 503, "not up"),
        (with_memory(pending=s.INIT_GROUP), s.PAUSE, {}, 409, "has not answered init_weights_update_group"),
        (DIRTY, s.CONTINUE, {}, 409, "mixture"),
        (CLEAN, s.UPDATE, {"group_name": "g"}, 409, "no session"),
        (DIRTY, s.UPDATE, {"group_name": "h"}, 400, "no group 'h'; its groups: g"),
        (DIRTY, s.UPDATE, {}, 400, "weight_update_group"),
        (CLEAN, s.TENSORS, ONE_RANK, 409, "no session"),
        (DIRTY, s.TENSORS, ONE_RANK | {"load_format": "mine.loader"}, 400, "load_format 'mine.loader' may end"),
        (DIRTY, s.TENSORS, {}, 400, "each of the engine's 1 ranks"),
        (TWO_RANKS, s.TENSORS, ONE_RANK, 400, "each of the engine's 2 ranks"),
        (ASLEEP, s.TENSORS, ONE_RANK, 409, "resume_memory_occupation comes first"),
        (CLEAN, s.END, {}, 400, "no weight update session"),
        (CLEAN, s.INIT_GROUP, {"group_name": "g"}, 400, "already"),
        (CLEAN, s.INIT_GROUP, {"group_name": ""}, 400, "needs a name"),
        (CLEAN, s.RESUME, {"tags": ["weights"]}, 409, "weights is not released"),
        (CLEAN, s.RESUME, {}, 409, "nothing is not released"),
        (CLEAN, s.LOAD, {"lora_name": "a", "lora_path": "/caf\udce9"}, 400, "lora_path holds half of a character"),
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
        (CLEAN, s.CONTINUE, {}),
        (CLEAN, s.BEGIN, {}),
        (DIRTY, s.BEGIN, {}),
        (DIRTY, s.UPDATE, {"group_name": "g"}),
        (DIRTY, s.TENSORS, ONE_RANK | {"load_format": None}),
        (TWO_RANKS, s.TENSORS, {"serialized_named_tensors": ["AAAA", "BBBB"], "load_format": "flattened_bucket"}),
        (DIRTY, s.END, {}),
        (CLEAN, s.INIT_GROUP, {"group_name": "new"}),
        (with_memory(released=["kv_cache"]), s.RESUME, {}),
    ],
)
def test_allowed(state: s.State, call: str, body: dict[str, Any]) -> None:
    assert guards.refusal(state, call, body) is None


def test_no_more_adapters_are_loaded_than_the_gate_can_be_told() -> None:
    full, held = with_memory(adapters={f"{n:060}": "/a" for n in range(245)}), f"{0:060}"
    assert guards.refusal(with_memory(adapters={f"{n:060}": "/a" for n in range(244)}), s.LOAD, {"lora_name": f"{244:060}"}) is None
    refused = guards.refusal(full, s.LOAD, {"lora_name": f"{245:060}"})
    assert refused is not None
    assert refused.status == 400
    assert "245 adapters are loaded" in refused.message
    assert "15000 characters" in refused.message
    assert guards.refusal(full, s.LOAD, {"lora_name": held}) is None, "it is on the list already"
    assert guards.refusal(full, s.UNLOAD, {"lora_name": held}) is None
    assert guards.refusal(CLEAN, s.LOAD, {"lora_name": "é" * 2500}) is not None, "as the gate is told: each é is six characters"


def test_bodies_are_made_safe() -> None:
    memory = s.Memory(released=["kv_cache"])
    assert guards.prepared(s.SET_VERSION, {"new_version": "7", "abort_all_requests": True}, memory)["abort_all_requests"] is False
    assert guards.prepared(s.RESUME, {"tags": None}, memory) == {"tags": ["kv_cache"]}
    assert guards.prepared(s.RELEASE, {}, memory) == {"tags": ["weights", "cuda_graph"]}, "not what is released already"
    assert guards.prepared(s.PAUSE, {"mode": "retract"}, memory) == {"mode": "retract"}
