"""Requests that name an adapter: gate and agent before a stand-in, and the coordinator before a scripted smg."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sglang_rollout.plugin.refusal import Refusal, read_refusal
from sglang_rollout.testing import StandIn
from tests.contract.support.agent_pod import Answer, Pod, run_pod
from tests.contract.support.coordinator_process import Lab, fleet_lab


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[tuple[Pod, StandIn]]:
    """Yield an open gate in front of an engine with adapters."""
    with StandIn(weight_version="base", lora=True) as stand_in:
        async with run_pod(tmp_path, stand_in.url) as made:
            await made.open_with_base()
            yield made, stand_in


async def ask(lab: Pod, adapter: object) -> Answer:
    return await lab.ask("POST", "/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}, "lora_path": adapter})


@pytest.mark.router
async def test_requests_name_an_adapter_only_while_it_is_loaded(engine: tuple[Pod, StandIn], tmp_path: Path) -> None:
    lab, _ = engine
    for _ in range(3):
        refused = await ask(lab, "math")
        refusal = Refusal("adapter_not_loaded", "LoRA adapter math is not loaded; GET /fleet lists those that are.")
        assert (refused.status, read_refusal(refused.body["error"]["message"])) == (400, refusal)
        loaded = await lab.control("/load_lora_adapter", {"lora_name": "math", "lora_path": str(tmp_path)})
        assert loaded.status == 200, loaded
        assert (await ask(lab, "math")).status == 200
        assert (await ask(lab, "maths")).status == 400
        assert (await lab.generate()).status == 200, "the model itself"
        assert (await lab.control("/unload_lora_adapter", {"lora_name": "math"})).status == 200
    assert (await ask(lab, "math")).status == 400


@pytest.mark.router
async def test_the_stand_in_pins_as_many_adapters_as_sglang(engine: tuple[Pod, StandIn], tmp_path: Path) -> None:
    lab, _ = engine
    body = {"lora_path": str(tmp_path), "pinned": True}
    answers = [await lab.control("/load_lora_adapter", {**body, "lora_name": str(number)}) for number in range(8)]
    assert [answer.status for answer in answers] == [200] * 7 + [400]
    assert "not allowed to pin all slots" in answers[-1].body["error_message"]
    assert (await lab.control("/unload_lora_adapter", {"lora_name": "0"})).status == 200
    assert (await lab.control("/load_lora_adapter", {**body, "lora_name": "7"})).status == 200


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[tuple[Lab, list[dict[str, Any]]]]:
    """Yield a coordinator whose trainers have loaded an adapter, and the bodies that reach smg."""
    seen: list[dict[str, Any]] = []

    async def tokens(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response({"choices": []})

    async with fleet_lab(tmp_path) as made:
        made.smg.answer_tokens = tokens
        status, reason, _ = await made.post("/load_lora_adapter", {"lora_name": "math", "lora_path": "/lora/math"})
        assert status == 200, reason
        yield made, seen


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", {"messages": []}), ("/v1/completions", {"prompt": "a"}), ("/v1/completions", {"prompt": "half \ud83d"})],
    ids=["chat", "completions", "lone surrogate"],
)
@pytest.mark.parametrize(
    ("model", "sent"),
    [
        ("m:math", {"model": "m", "lora_path": "math"}),
        ("reg/m:v1:math", {"model": "reg/m:v1", "lora_path": "math"}),
        ("m:other", {"model": "m:other"}),
        ("m", {"model": "m"}),
        (":math", {"model": ":math"}),
    ],
)
async def test_a_model_name_with_an_adapter_is_split_for_smg(
    fleet: tuple[Lab, list[dict[str, Any]]], path: str, body: dict[str, Any], model: str, sent: dict[str, Any]
) -> None:
    lab, seen = fleet
    status, _, _ = await lab.post(path, {**body, "model": model})
    assert status == 200
    assert seen == [{**body, **sent}]
