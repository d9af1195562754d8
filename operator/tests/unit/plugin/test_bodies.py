"""The rules on the JSON of a request, before SGLang validates it."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_rollout.plugin.bodies import DEEPEST, PATHS, check_body, find_problem
from sglang_rollout.plugin.settings import Limits
from sglang_rollout.sglang.api import DATA_PATHS

CONTEXT = 100
CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
LONG = "a" * (16 * CONTEXT + 1)


def judge(body: Any, path: str = CHAT, **limits: Any) -> str:
    refusal = find_problem(path, body, Limits(**limits), CONTEXT)
    return "" if refusal is None else str(refusal)


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"anyOf": [value]}
    return value


@pytest.mark.parametrize(
    ("path", "body", "start"),
    [
        (CHAT, {"messages": [1] * 300_000}, "above_limit: The request has more than 20000 values up to messages; engine.limits.valuesPer"),
        (CHAT, {"messages": ["", {}] * 20_000}, "above_limit: The request has more than 20000 values up to messages"),
        (CHAT, {"messages": [], "tools": [TOOL] * 100_000}, "above_limit: The request has more than 20000 values up to tools"),
        (CHAT, {str(number): 1 for number in range(20_001)}, "above_limit: The request has more than 20000 values up to 20000"),
        ("/v1/completions", {"prompt": ["a"] * 10**6}, "above_limit: The request has more than 20000 values up to prompt"),
        (CHAT, {"tools": [{"function": {"description": "x" * 131_073}}]}, "above_limit: tools and response_format have more than 131072"),
        (CHAT, {"tools": [{"x" * 131_073: 1}]}, "above_limit: tools and response_format have more than 131072 bytes"),
        (CHAT, {"messages": [{"content": LONG}]}, "above_limit: messages has 1601 characters, which is more than 1600: 16 for each token"),
        (CHAT, {"messages": [{"content": [{"type": "text", "text": "a" * 801}]}] * 2}, "above_limit: messages has 1602 characters"),
        (TOKENIZE, {"prompt": LONG}, "above_limit: prompt has 1601 characters"),
        (TOKENIZE, {"prompt": ["a" * 900] * 2}, "above_limit: prompt has 1800 characters"),
        ("/v1/tokenize", {"prompt": LONG}, "above_limit: prompt has 1601 characters"),
        ("/v1/rerank", {"documents": ["a", LONG]}, "above_limit: documents has 1601 characters"),
        (CHAT, {"response_format": nested(DEEPEST)}, "unreadable_body: response_format has more than 200 levels"),
    ],
)
def test_a_body_that_would_busy_the_server_is_refused(path: str, body: dict[str, Any], start: str) -> None:
    assert judge(body, path)[: len(start)] == start


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [5] * 128_000, "sampling_params": {"logit_bias": {str(token): 0.5 for token in range(150_000)}}}),
        ("/generate", {"input_embeds": [[0.5] * 8] * 30_000}),
        ("/v1/completions", {"prompt": [[5, 6]] * 30_000}),
        ("/v1/completions", {"prompt": ["a" * 1600] * 16_000}),
        ("/detokenize", {"tokens": [5] * 100_000}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * 700, "tools": [TOOL] * 100}),
        (CHAT, {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 10**6}}]}]}),
        ("/generate", {"text": "a", "image_data": "A" * 10**6}),
        (CHAT, {"response_format": nested(50)}),
        ("/generate", []),
        ("/generate", None),
    ],
)
def test_a_body_of_a_trainer_passes(path: str, body: Any) -> None:
    assert judge(body, path) == ""


def test_a_limit_can_be_raised() -> None:
    assert judge({"messages": [1] * 300_000}, values_per_request=400_000) == ""
    assert "grammarBytes" in judge({"tools": ["x" * 100]}, grammar_bytes=50)


def test_every_path_that_the_gate_passes_is_checked() -> None:
    assert set(DATA_PATHS) <= PATHS


def test_the_names_of_a_control_call_are_not_counted() -> None:
    async def read(_: Any) -> Any:
        return {"names": ["a"] * 10**6}

    assert (
        len(asyncio.run(check_body(read, SimpleNamespace(url=SimpleNamespace(path="/update_weights_from_distributed"))))["names"]) == 10**6
    )


def test_time_grows_with_the_body_only() -> None:
    bodies: list[dict[str, Any]] = [
        {"messages": [[]] * 10**6},
        {"input_ids": [[7]] * 10**6},
        {"tools": [{"a": "b"}] * 10**5},
        {"prompt": "a" * 10**7},
    ]
    for body in bodies:
        began = time.process_time()
        judge(body)
        assert time.process_time() - began < 3
