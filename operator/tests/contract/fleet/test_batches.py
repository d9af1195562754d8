"""Batches through front, smg, gate and coordinator have the answers of a real engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests

from sglang_rollout.wire.ports import VERSION_HEADER
from tests.contract.support.engine_servers import TIMES
from tests.contract.support.local_fleet import Urls

pytestmark = [pytest.mark.router, pytest.mark.engine, pytest.mark.timeout(420)]

GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
CHANGING = {"e2e_latency", *TIMES, "cached_tokens", "cached_tokens_details", "id", "created"}
"""Times, hits of the cache, and generated IDs."""


def steady(value: Any, keep: frozenset[str] = frozenset()) -> Any:
    """Return an answer without the fields that differ from call to call."""
    if isinstance(value, dict):
        return {key: steady(item, keep) for key, item in value.items() if key not in CHANGING - keep}
    if isinstance(value, float):  # rows of other requests in the batch change the last digits of a log-probability
        return round(value, 3)
    return [steady(item, keep) for item in value] if isinstance(value, list) else value


def both(urls: Urls, body: dict[str, Any], path: str = "/generate") -> tuple[requests.Response, requests.Response]:
    return tuple(requests.post(url + path, json=body, timeout=60) for url in (urls.fleet, urls.engines[0]))  # type: ignore[return-value]


@pytest.mark.parametrize(
    "body",
    [
        {"text": ["alpha", "beta", "gamma"], "sampling_params": GREEDY},
        {"text": ["alpha"], "sampling_params": GREEDY},
        {"text": [], "sampling_params": GREEDY},
        {"input_ids": [[11, 22], [33]], "sampling_params": [GREEDY, GREEDY | {"max_new_tokens": 3}]},
        {"input_ids": [[11, 22], [33]], "rid": ["a", "b"], "sampling_params": GREEDY},
        {"input_ids": [[11, 22], [33]], "rid": "q", "sampling_params": GREEDY},
        {"input_ids": [[11, 22], [33]], "return_logprob": [True, False], "top_logprobs_num": [2, 0], "sampling_params": GREEDY},
        {"input_ids": [[11, 22], [33]], "return_logprob": True, "logprob_start_len": [0, -1], "sampling_params": GREEDY},
        {"input_ids": [[11, 22], [33]], "return_logprob": True, "token_ids_logprob": [[1], [2, 3]], "sampling_params": GREEDY},
        {"input_ids": [[11, 22], [33]], "sampling_params": GREEDY | {"n": 2}},
        {"text": ["alpha", "beta"], "image_data": [None, None], "sampling_params": GREEDY},
        {"input_ids": [[i + 1, i + 2, i + 3] for i in range(40)], "sampling_params": GREEDY},
    ],
    ids=range(12),
)  # fmt: skip
def test_a_batch_has_the_engines_answer(urls: Urls, body: dict[str, Any]) -> None:
    ours, own = both(urls, body)
    assert (ours.status_code, own.status_code) == (200, 200), ours.text
    keep = frozenset({"id"}) if "rid" in body else frozenset()
    assert steady(ours.json(), keep) == steady(own.json(), keep)
    assert ours.headers["Content-Type"] == own.headers["Content-Type"]
    assert ours.headers.get(VERSION_HEADER) == (None if body.get("text") == [] else urls.version())


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [[11], [22]], "sampling_params": [GREEDY, {**GREEDY, "temperature": -1.5}]},
        {"input_ids": [[11], [22] * 5000], "sampling_params": GREEDY},
        {"input_ids": [[11], [22]], "rid": ["a"], "sampling_params": GREEDY},
        {"input_ids": [[11], [22]], "rid": ["a", "a"], "sampling_params": GREEDY},
        {"text": ["a", "b"], "sampling_params": [{**GREEDY, "n": 1}, {**GREEDY, "n": 2}]},
        {"text": ["a", "b"], "image_data": ["AAAA"], "sampling_params": GREEDY},
    ],
    ids=range(6),
)
def test_a_batch_has_the_engines_refusal(urls: Urls, body: dict[str, Any]) -> None:
    ours, own = both(urls, body)
    assert (ours.status_code, ours.json()) == (own.status_code, own.json())
    assert ours.status_code == 400


def ends(reply: requests.Response) -> dict[int, Any]:
    """Return the last event of each index of a complete stream."""
    assert reply.status_code == 200
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return {event["index"]: steady(event) for event in map(json.loads, lines)}


@pytest.mark.parametrize("n", [1, 2])
def test_a_streamed_batch_ends_as_the_engines_stream(urls: Urls, n: int) -> None:
    params = [{**GREEDY, "n": n}, {**GREEDY, "n": n, "max_new_tokens": 3}]
    ours, own = both(urls, {"text": ["alpha", "beta"], "sampling_params": params, "stream": True})
    assert ours.headers["Content-Type"] == own.headers["Content-Type"]
    assert ends(ours) == ends(own)
    assert sorted(ends(ours)) == list(range(2 * n))


@pytest.mark.parametrize("prompt", [[11, 22], [[11, 22], [33]], "alpha", ["alpha", "beta"]], ids=range(4))
@pytest.mark.parametrize("stream", [False, True])
def test_completions_accept_every_form_of_prompt(urls: Urls, prompt: Any, stream: bool) -> None:
    ours, own = both(urls, {"model": urls.model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": stream}, "/v1/completions")
    assert (ours.status_code, own.status_code) == (200, 200), ours.text
    if stream:
        assert ours.text.rstrip().endswith("[DONE]")
    else:
        assert steady(ours.json()) == steady(own.json())
    assert ours.headers[VERSION_HEADER] == urls.version()


def test_every_data_answer_names_its_version(urls: Urls) -> None:
    chat = {"model": urls.model, "messages": [{"role": "user", "content": "alpha"}], "max_tokens": 2}
    for path, body in (("/generate", {"text": "alpha", "sampling_params": GREEDY}), ("/v1/chat/completions", chat)):
        for stream in (False, True):
            reply = requests.post(urls.fleet + path, json={**body, "stream": stream}, timeout=60)
            assert reply.status_code == 200, reply.text
            assert reply.headers[VERSION_HEADER] == urls.version()
