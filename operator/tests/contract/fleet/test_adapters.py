"""Adapters on a fleet of two real SGLang servers. On a CPU SGLang needs a correction for them (``SGLANG_CPU_PATCHES=lora``)."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from e2e.engine import environment

from sglang_rollout.plugin.refusal import Refusal, read_refusal
from tests.contract.support.agent_pod import Answer, until
from tests.contract.support.complete_fleet import CompleteFleet, complete_fleet
from tests.support.paths import CONTRACT_SUPPORT

pytestmark = [pytest.mark.router, pytest.mark.engine, pytest.mark.timeout(420)]

GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
NAMES = ("math", "code")


@pytest.fixture
async def fleet(sglang_pair: list[str], tmp_path: Path) -> AsyncIterator[CompleteFleet]:
    async with complete_fleet(tmp_path, sglang_pair) as made:
        await made.serving(2)
        yield made
        for name in NAMES:
            await load(made, name, None)


def adapter(folder: Path, seed: int) -> str:
    """Create an adapter of random weights, and return its path."""
    maker = CONTRACT_SUPPORT / "make_adapter.py"
    command = [str(environment.python(make=False)), str(maker), str(environment.model()), str(folder), str(seed)]
    subprocess.run(command, check=True, timeout=60, env=environment.environment_variables())
    return str(folder)


async def load(fleet: CompleteFleet, name: str, path: str | None, **more: Any) -> Answer:
    """Load an adapter on the fleet; without a path unload it."""
    body = {"lora_name": name} | ({"lora_path": path} if path else {}) | more
    return await fleet.ask("POST", "/load_lora_adapter" if path else "/unload_lora_adapter", body)


async def tokens(fleet: CompleteFleet, name: str | None) -> list[int]:
    """Return the tokens that the fleet and each engine answer with an adapter, which are equal."""
    body = {"input_ids": [5, 6, 7], "sampling_params": GREEDY, "lora_path": name}
    answers = [(await fleet.generate(body, at))["output_ids"] for at in (*(pod.url for pod in fleet.pods), None)]
    assert answers == [answers[0]] * 3
    return list(answers[0])


async def chat(fleet: CompleteFleet, **more: Any) -> Answer:
    body = {"messages": [{"role": "user", "content": "alpha beta"}], "max_tokens": 12, "temperature": 0}
    return await fleet.ask("POST", "/v1/chat/completions", body | more)


async def chat_text(fleet: CompleteFleet, **more: Any) -> str:
    answers = [await chat(fleet, **more) for _ in fleet.pods]  # the router asks the engines in turn
    assert {answer.status for answer in answers} == {200}, answers
    (text,) = {answer.body["choices"][0]["message"]["content"] for answer in answers}
    return str(text)


async def refused(fleet: CompleteFleet, name: str) -> None:
    """Assert that each engine refuses the adapter at every URL."""
    for at in (None, *(pod.url for pod in fleet.pods)):
        answer = await fleet.ask("POST", "/generate", {"input_ids": [5], "sampling_params": GREEDY, "lora_path": name}, at)
        refusal = Refusal("adapter_not_loaded", f"LoRA adapter {name} is not loaded; GET /fleet lists those that are.")
        assert (answer.status, read_refusal(answer.body["error"]["message"])) == (400, refusal)


async def test_every_engine_serves_an_adapter_only_while_it_is_loaded(fleet: CompleteFleet, tmp_path: Path) -> None:
    absent = await load(fleet, "math", str(tmp_path / "absent"))
    assert (absent.status, "absent" in str(absent.body)) == (400, True), absent
    unknown = await load(fleet, "math", None)
    assert (unknown.status, "math" in str(unknown.body)) == (400, True), unknown

    base = await tokens(fleet, None)
    found = {}
    for seed, name in enumerate(NAMES, 1):
        await refused(fleet, name)
        loaded = await load(fleet, name, adapter(tmp_path / name, seed))
        assert loaded.status == 200, loaded
        found[name] = await tokens(fleet, name)
    assert len({str(each) for each in (base, *found.values())}) == 3, "each adapter has its own tokens"
    assert await tokens(fleet, None) == base
    rows = (await fleet.document())["adapters"]
    assert [(row["name"], row["loaded"], row["wanted"]) for row in rows] == [(name, 2, 2) for name in NAMES]

    model = (await fleet.ask("GET", "/v1/models")).body["data"][0]["id"]
    with_adapter = await chat_text(fleet, model=model, lora_path="math")
    assert with_adapter == await chat_text(fleet, model=f"{model}:math") != await chat_text(fleet, model=model)

    # Other contents under the name of a loaded adapter.
    again = await load(fleet, "math", adapter(tmp_path / "math2", 3))
    assert again.status == 200, again
    assert await tokens(fleet, "math") not in (base, *found.values())

    assert (await load(fleet, "math", None)).status == 200
    await refused(fleet, "math")
    gone = await chat(fleet, model=f"{model}:math")
    assert (gone.status, gone.body["error"]["code"]) == (404, "model_not_found"), gone
    assert await tokens(fleet, "code") == found["code"]


async def test_a_pinned_adapter_is_pinned_again_after_an_engine_restart(fleet: CompleteFleet, tmp_path: Path) -> None:
    """With two slots SGLang pins one adapter and refuses to pin a second one."""
    unknown = await load(fleet, "math", str(tmp_path / "math"), added_tokens_config={})
    assert (unknown.status, "has no field 'added_tokens_config'" in unknown.body["message"]) == (400, True), unknown
    assert (await load(fleet, "math", adapter(tmp_path / "math", 1), pinned=True)).status == 200
    first = fleet.pods[0]
    status = await first.status()
    lost = await first.control("/unload_lora_adapter", {"lora_name": "math"}, term=status.term)
    assert lost.status == 200, lost

    async def held_again() -> bool:
        return "math" in [row["id"] for row in (await fleet.ask("GET", "/v1/models", at=first.engine_url)).body["data"]]

    assert not await held_again()
    await until(held_again, 20, "the coordinator has loaded the adapter again")
    assert [(row["name"], row["pinned"]) for row in (await fleet.document())["adapters"]] == [("math", True)]
    second = {"lora_name": "code", "lora_path": str(tmp_path / "math"), "pinned": True}
    for pod in fleet.pods:
        refused = await fleet.ask("POST", "/load_lora_adapter", second, pod.engine_url)
        assert (refused.status, "not allowed to pin all slots" in refused.body["error_message"]) == (400, True), refused
