"""Requests above a limit never pass the gate's filter, and requests within all limits always do."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_rollout.api.limits_spec import Limits
from tests.support.guard_filter import run

pytestmark = pytest.mark.router


LIMITS = Limits(samples_per_prompt=8, prompts_per_request=4, samples_per_request=16, logprobs_per_token=5, grammar_bytes=60)
PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")

numbers: st.SearchStrategy[float | None] = st.sampled_from([0, 1, 2, 5, 8, 9, 17, 2**31, 2**63, 1e308, 5.0, -1, None, True])
words = st.text(alphabet='ab"\\{}[]:,n \n\u00e9\u540d', max_size=12)
tokens = st.lists(st.integers(0, 99), min_size=1, max_size=6)
prompts = st.one_of(
    words.map(lambda text: text + "x"),
    st.lists(words.map(lambda text: text + "x"), min_size=1, max_size=6),
    tokens,
    st.lists(tokens, min_size=1, max_size=6),
)
nested = st.recursive(st.none() | words | numbers, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3))


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, str, bool]:
    """Draw a path, a body, and whether the body is within the limits."""
    path = draw(st.sampled_from(PATHS))
    prompt, samples, logprobs = draw(prompts), draw(numbers), draw(numbers)
    grammar, token_ids = draw(st.sampled_from(["", "x" * 40, "x" * 80])), draw(st.lists(st.integers(0, 99), max_size=7))
    inner: dict[str, Any] = {"n": samples, "regex": grammar, "custom_params": {"n": 99, "x": draw(nested)}}
    body: dict[str, Any] = {"metadata": draw(nested)}
    is_text = isinstance(prompt, str) or isinstance(prompt[0], str)
    if path == "/generate":
        body |= {"text" if is_text else "input_ids": prompt, "top_logprobs_num": logprobs, "sampling_params": inner}
        body["token_ids_logprob"] = token_ids
    elif path == "/v1/completions":
        body |= {"prompt": prompt, "logprobs": logprobs, **inner}
    else:
        body |= {"messages": [{"role": "user", "content": prompt}], "top_logprobs": logprobs, **inner}
    rows = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) and path != PATHS[2] else 1
    within = (
        _number(samples) <= LIMITS.samples_per_prompt
        and rows <= LIMITS.prompts_per_request
        and rows * max(1, _number(samples)) <= LIMITS.samples_per_request
        and _number(logprobs) <= LIMITS.logprobs_per_token
        and len(grammar) < LIMITS.grammar_bytes
        and (path != "/generate" or len(token_ids) <= LIMITS.logprobs_per_token)
    )
    keys = draw(st.permutations(list(body)))
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n ", " : ")]))
    return path, json.dumps({key: body[key] for key in keys}, ensure_ascii=draw(st.booleans()), separators=separators), within


def _number(value: float | None) -> float:
    return 1 if value is None or isinstance(value, bool) else value


@settings(deadline=None, max_examples=10)
@given(st.lists(requests(), min_size=40, max_size=40))
def test_requests_pass_if_and_only_if_they_are_within_the_limits(drawn: list[tuple[str, str, bool]]) -> None:
    """Many requests in one haproxy, because each start of it takes half a second."""
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), [(path, "?", body) for path, body, _ in drawn], "?", LIMITS)
    for (path, body, within), sentence in zip(drawn, found, strict=True):
        assert (sentence == "") == within, (path, body, sentence)
        assert within or "engine.limits." in sentence
