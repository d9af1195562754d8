"""Requests that smg would refuse or change: the exact predicate, and the patterns with which the front finds candidates."""

import json
import re
from typing import Any

import pytest

from sglang_rollout.sglang.smg_limits import GENERATE_PATTERN, OPENAI_PATTERN, should_bypass_smg

GENERATE, CHAT, COMPLETIONS = "/generate", "/v1/chat/completions", "/v1/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "u", "detail": "low"}}


CASES: list[tuple[str, Any, bool]] = [
    (GENERATE, {"text": "a"}, False),
    (GENERATE, {"text": "a", "sampling_params": {"n": 64, "stop": list("abcdef"), "temperature": 3, "top_k": 0}}, False),
    (GENERATE, {"text": "a", "sampling_params": {"logit_bias": {"7": 1}}}, True),
    (GENERATE, {"text": "a", "sampling_params": {"bogus": 1}}, True),
    (GENERATE, {"text": "a", "logit_bias": {"7": 1}}, False),
    (GENERATE, {"text": "a", "sampling_params": ["x"]}, False),
    (GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": None}}, True),
    (GENERATE, {"text": "a", "sampling_params": {"temperature": None, "stop": None}}, False),
    (GENERATE, {"text": "a", "model": None}, False),
    (GENERATE, ["x"], False),
    (CHAT, {"n": 10, "top_logprobs": 20, "temperature": 2, "stop": list("abcd"), "top_k": -1, "logit_bias": {"7": 1}}, False),
    (CHAT, {"n": 11}, True),
    (CHAT, {"n": 10**400}, True),
    (CHAT, {"top_logprobs": 21}, True),
    (CHAT, {"temperature": 2.1}, True),
    (CHAT, {"stop": list("abcde")}, True),
    (CHAT, {"stop": "abcde"}, False),
    (CHAT, {"top_k": 0}, True),
    (CHAT, {"n": "many", "top_k": None}, False),
    (CHAT, {"messages": [{"content": "a"}, {"content": [IMAGE, {"type": "video_url", "video_url": {"url": "u", "fps": 2}}]}]}, False),
    (CHAT, {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "u", "max_dynamic_patch": 4}}]}]}, True),
    (CHAT, {"messages": [{"content": "a"}, {"content": [IMAGE, IMAGE | {"modalities": "multi-images"}]}]}, True),
    (CHAT, {"messages": ["a", {"content": ["a"]}, {}]}, False),
    (COMPLETIONS, {"n": 128, "logprobs": 20}, False),
    (COMPLETIONS, {"n": 129}, True),
    (COMPLETIONS, {"logprobs": 21}, True),
]


@pytest.mark.parametrize(("path", "body", "expected"), CASES)
def test_only_bodies_that_smg_cannot_carry_bypass_it(path: str, body: Any, expected: bool) -> None:
    assert should_bypass_smg(path, body) is expected


@pytest.mark.parametrize(
    ("path", "body"),
    [(path, body) for path, body, bypasses in CASES if bypasses and body != {"text": "a", "sampling_params": {"bogus": 1}}],
)
def test_the_fronts_pattern_finds_every_body_that_must_bypass_smg(path: str, body: Any) -> None:
    pattern = GENERATE_PATTERN if path == GENERATE else OPENAI_PATTERN
    posix = '[{,][[:space:]]*"(' + pattern + ")"
    expression = re.compile(posix.replace("[[:space:]]", r"\s"))
    assert expression.search(json.dumps(body))
    assert expression.search(json.dumps(body, indent=1))


@pytest.mark.parametrize("value", [None, "other", "", 5])
def test_the_front_finds_fields_that_sglang_ignores_and_smg_does_not(value: object) -> None:
    expression = re.compile(('[{,][[:space:]]*"(' + GENERATE_PATTERN + ")").replace("[[:space:]]", r"\s"))
    assert expression.search(json.dumps({"model": value, "input_ids": [5]}))
    assert not expression.search(json.dumps({"text": "model", "input_ids": [5]}))
