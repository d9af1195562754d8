"""What verl's HTTP server adapter (``AsyncHttpServerAdapter``, 0.9.1) says to a server, said to a fleet: the coordinator over HTTP, with
agents and an smg that are faked behind real HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fleet_lab import Lab, fleet_lab

from sglang_rollout.wire.states import KEEPS_WEIGHTS, LENT, FleetMode

TAGS = {"tags": ["kv_cache", "weights"]}
"""Of ``sleep`` and ``wake_up`` for servers that take no weights."""
CACHE = {"tags": ["kv_cache"]}
PROMPT = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
TOKENS = {"output_ids": [7, 8], "meta_info": {"id": "a", "finish_reason": {"type": "length", "length": 2}}}


async def _tokens(request: web.Request) -> web.StreamResponse:
    return web.json_response(TOKENS)


@asynccontextmanager
async def made(folder: Path, mode: FleetMode | None) -> AsyncIterator[Lab]:
    async with fleet_lab(folder, mode=mode) as lab:
        lab.smg.answer_tokens = _tokens
        await lab.until("something is known of the engines", lambda: answers(lab, "/server_info"))
        yield lab


async def answers(lab: Lab, path: str) -> bool:
    return (await lab.get(path))[0] == 200


@pytest.fixture
async def own_gpus(tmp_path: Path) -> AsyncIterator[Lab]:
    async with made(tmp_path, None) as lab:
        yield lab


@pytest.fixture
async def colocated(tmp_path: Path) -> AsyncIterator[Lab]:
    async with made(tmp_path, FleetMode.COLOCATED) as lab:
        await lab.until("it sleeps", lambda: has_released(lab, TAGS["tags"]))
        yield lab


async def has_released(lab: Lab, tags: list[str]) -> bool:
    return all(agent.agent.released == tags for agent in lab.agents)


async def call(lab: Lab, method: str, path: str, body: Any = None) -> Any:
    """As the adapter does: anything but a 2xx is an error, and the body is JSON or nothing."""
    status, reason, answer = await lab.call(method, path, body)
    assert 200 <= status < 300, f"{path}: {status} {reason}"
    return answer


async def generates(lab: Lab) -> None:
    assert await call(lab, "POST", "/generate", PROMPT) == TOKENS


async def test_a_fleet_with_gpus_of_its_own_is_one_server_to_the_adapter(own_gpus: Lab) -> None:
    lab = own_gpus
    assert (await call(lab, "GET", "/v1/models"))["data"] == [{"id": "m"}]
    await generates(lab)
    for body in ({"rid": "", "abort_all": True}, {"rid": "r1", "abort_all": False}):
        await call(lab, "POST", "/abort_request", body)
    await call(lab, "GET", "/flush_cache")
    assert [len(agent.heard("/flush_cache")) for agent in lab.agents] == [1, 1]
    # verl's checkpoint engine has the cache released while weights come, and nothing else.
    await call(lab, "POST", "/release_memory_occupation", CACHE)
    assert await has_released(lab, CACHE["tags"])
    await lab.serving(0)
    await call(lab, "POST", "/resume_memory_occupation", CACHE)
    await lab.serving(2)
    await generates(lab)


async def test_handles_of_gpu_memory_are_refused_by_a_fleet_with_the_way_out(own_gpus: Lab) -> None:
    body = {"serialized_named_tensors": ["AAAA"], "load_format": None, "flush_cache": False}
    status, reason, answer = await own_gpus.post("/update_weights_from_tensor", body)
    assert (status, "init_weights_update_group" in answer["message"]) == (501, True)
    assert "is not for a fleet" in reason
    assert not any(agent.heard("/update_weights_from_tensor") for agent in own_gpus.agents)


async def test_a_judge_on_the_trainers_gpus_wakes_judges_and_sleeps(colocated: Lab) -> None:
    lab = colocated
    for _ in range(2):
        status, _, answer = await lab.post("/generate", PROMPT)
        assert (status, answer["error"]["message"]) == (503, LENT)
        await call(lab, "POST", "/resume_memory_occupation", TAGS)
        assert all(agent.agent.gate_open for agent in lab.agents), "before it is answered: the adapter generates at once"
        await call(lab, "GET", "/flush_cache")
        await generates(lab)
        await call(lab, "POST", "/abort_request", {"rid": "", "abort_all": True})
        await call(lab, "POST", "/release_memory_occupation", TAGS)
        assert await has_released(lab, TAGS["tags"])
    assert (await lab.get("/fleet/held"))[0] == 200, "the front sends requests to whoever can say why"


@pytest.mark.parametrize(
    "path",
    [
        "/update_weights_from_tensor",
        "/update_weights_from_ipc",
        "/init_weights_update_group",
        "/begin_weight_update",
        "/update_weights_from_disk",
        "/update_weight_version",
        "/end_weight_update",
        "/destroy_weights_update_group",
    ],
)
async def test_a_judge_refuses_every_weight(colocated: Lab, path: str) -> None:
    body = {"model_path": "/m", "new_version": "2", "group_name": "g"}
    status, reason, answer = await colocated.post(path, body)
    assert (status, answer["message"]) == (400, KEEPS_WEIGHTS)
    assert "spec.mode: Colocated" in reason
    assert not any(agent.heard(path) for agent in colocated.agents)
