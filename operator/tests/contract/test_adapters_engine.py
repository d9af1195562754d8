"""Adapters on a real SGLang server, behind gate and agent. On a CPU SGLang needs a correction for them (``SGLANG_CPU_PATCHES=lora``)."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from agent_lab import Answer, Pod, pod
from e2e.engine import LabError, environment, make_engine
from ports import free_port

pytestmark = [pytest.mark.router, pytest.mark.engine, pytest.mark.timeout(420)]

FLAGS = ("--enable-lora", "--max-lora-rank", "4", "--lora-target-modules", "q_proj", "v_proj", "--lora-backend", "torch_native")
CHAT = {"messages": [{"role": "user", "content": "alpha beta"}], "max_tokens": 12, "temperature": 0}


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Pod]:
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    engine = make_engine(free_port(), args=FLAGS, log=tmp_path / "engine.log", env={"SGLANG_CPU_PATCHES": "lora"})
    engine.start()
    try:
        engine.wait()
        async with pod(tmp_path, engine.url) as made:
            await made.open_with_base()
            yield made
    finally:
        engine.kill()


def adapter(folder: Path, seed: int) -> str:
    """An adapter of random weights; its path."""
    maker = Path(__file__).with_name("adapter_maker.py")
    command = [str(environment.python(make=False)), str(maker), str(environment.model()), str(folder), str(seed)]
    subprocess.run(command, check=True, timeout=60, env=environment.environment_variables())
    return str(folder)


async def generate(lab: Pod, **more: Any) -> Answer:
    return await lab.ask("POST", "/generate", {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 12}, **more})


async def said(lab: Pod, **more: Any) -> str:
    answer = await lab.ask("POST", "/v1/chat/completions", CHAT | more)
    assert answer.status == 200, answer
    return str(answer.body["choices"][0]["message"]["content"])


async def test_an_adapter_answers_while_it_is_loaded_and_never_after(lab: Pod, tmp_path: Path) -> None:
    absent = await lab.control("/load_lora_adapter", {"lora_name": "math", "lora_path": str(tmp_path / "absent")})
    assert absent.status == 400, absent
    assert "absent" in absent.body["error_message"]
    unknown = await lab.control("/unload_lora_adapter", {"lora_name": "math"})
    assert (unknown.status, "does not exist" in unknown.body["error_message"]) == (400, True), unknown

    base = (await generate(lab)).body["output_ids"]
    tokens = {}
    for name, seed in (("math", 1), ("code", 2)):
        assert (await generate(lab, lora_path=name)).body["error"]["code"] == "adapter_not_loaded"
        loaded = await lab.control("/load_lora_adapter", {"lora_name": name, "lora_path": adapter(tmp_path / name, seed)})
        assert loaded.status == 200, loaded
        tokens[name] = (await generate(lab, lora_path=name)).body["output_ids"]
    assert len({str(each) for each in (base, *tokens.values())}) == 3, "each answers with tokens of its own"
    assert (await generate(lab)).body["output_ids"] == base
    assert (await generate(lab, lora_path=None)).body["output_ids"] == base

    # What the coordinator makes of `model: "name:adapter"` is what SGLang itself does with it.
    assert await said(lab, model="default", lora_path="math") == await said(lab, model="default:math") != await said(lab, model="default")

    # Other contents under an old name.
    assert (await lab.control("/unload_lora_adapter", {"lora_name": "math"})).status == 200
    assert (await generate(lab, lora_path="math")).body["error"]["code"] == "adapter_not_loaded"
    assert (await generate(lab, lora_path="code")).body["output_ids"] == tokens["code"]
    again = await lab.control("/load_lora_adapter", {"lora_name": "math", "lora_path": adapter(tmp_path / "math2", 3)})
    assert again.status == 200, again
    assert (await generate(lab, lora_path="math")).body["output_ids"] not in (base, tokens["math"], tokens["code"])
