"""A fleet of two real engines has the answers of an engine, except for IDs, times and the choice of the engine.

``test_batches.py`` tests batches.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from e2e.engine import environment
from e2e.fuzz.fields import field_defaults, sglang_source

from tests.contract.fleet.test_batches import GREEDY, both, steady
from tests.contract.support.local_fleet import Urls

pytestmark = [pytest.mark.router, pytest.mark.engine, pytest.mark.timeout(420)]

GENERATE, CHAT, COMPLETIONS, SCORE = "/generate", "/v1/chat/completions", "/v1/completions", "/v1/score"
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
IDS = {"input_ids": [11, 22, 33], "sampling_params": GREEDY}
MESSAGES = {"messages": [{"role": "user", "content": "alpha"}], "max_tokens": 4, "temperature": 0}
PROMPT = {"prompt": "alpha", "max_tokens": 4, "temperature": 0}


def sampled(**params: Any) -> dict[str, Any]:
    return {"text": "alpha", "sampling_params": GREEDY | params}


ANSWERED: list[tuple[str, dict[str, Any]]] = [
    (GENERATE, sampled()),
    (GENERATE, IDS),
    (GENERATE, {"text": None, "input_ids": [5], "rid": None, "sampling_params": GREEDY}),
    (GENERATE, sampled(n=3)),
    (GENERATE, IDS | {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [5, 6]}),
    (GENERATE, IDS | {"return_logprob": True, "return_text_in_logprobs": True}),
    (GENERATE, sampled(stop=["e", "a"], max_new_tokens=40)),
    (GENERATE, sampled(stop="e", no_stop_trim=True, max_new_tokens=40)),
    (GENERATE, sampled(stop_token_ids=list(range(1000)), max_new_tokens=40)),
    (GENERATE, sampled(stop_regex="[a-z]", max_new_tokens=40)),
    (GENERATE, sampled(regex="[0-9]{3}")),
    (GENERATE, sampled(json_schema=SCHEMA, max_new_tokens=20)),
    (GENERATE, sampled(ebnf='root ::= "ab" | "cd"')),
    (GENERATE, sampled(logit_bias={"7": 100.0})),
    (GENERATE, {"text": ["alpha", "beta"], "sampling_params": [GREEDY | {"logit_bias": {"7": 100.0}}, GREEDY]}),
    (
        GENERATE,
        sampled(frequency_penalty=0.5, presence_penalty=0.5, min_new_tokens=2, top_k=5, top_p=0.5, min_p=0.1),
    ),
    (GENERATE, sampled() | {"image_data": "data:image/png;base64,AAAA"}),  # a text model ignores images
    (GENERATE, sampled() | {"extra_key": "k", "cache_salt": "s", "priority": 3, "session_id": "s"}),
    (CHAT, MESSAGES),
    (CHAT, MESSAGES | {"logprobs": True, "top_logprobs": 2}),
    (CHAT, MESSAGES | {"logprobs": True, "top_logprobs": 25}),
    (CHAT, MESSAGES | {"n": 2}),
    (CHAT, MESSAGES | {"n": 16}),
    (CHAT, MESSAGES | {"top_k": 0}),
    (CHAT, MESSAGES | {"stop": ["e"], "max_tokens": 30}),
    (CHAT, MESSAGES | {"stop": ["1", "2", "3", "4", "5", "b"], "max_tokens": 30}),
    (CHAT, MESSAGES | {"stop_token_ids": list(range(1000)), "max_tokens": 30}),
    (CHAT, MESSAGES | {"logit_bias": {"7": 100}}),
    (CHAT, MESSAGES | {"regex": "[0-9]+"}),
    (CHAT, MESSAGES | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": json.loads(SCHEMA)}}}),
    (CHAT, MESSAGES | {"return_meta_info": True, "return_token_ids": True, "session_id": "s"}),
    (COMPLETIONS, PROMPT),
    (COMPLETIONS, PROMPT | {"logprobs": 2, "echo": True}),
    (COMPLETIONS, PROMPT | {"n": 2}),
    (COMPLETIONS, PROMPT | {"stop": "e", "max_tokens": 30}),
    (COMPLETIONS, PROMPT | {"logit_bias": {"7": 100}}),
    (SCORE, {"query": "alpha", "items": ["beta", "gamma"], "label_token_ids": [5, 6], "apply_softmax": True}),
    (SCORE, {"query": [5], "items": [[6], [7, 8]], "label_token_ids": [5, 6]}),
    ("/tokenize", {"prompt": "alpha beta"}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/get_weights_by_name", {"name": "model.norm.weight"}),
    ("/get_weights_by_name", {"name": "model.layers.0.self_attn.q_proj.weight", "truncate_size": 3}),
]


def asked(urls: Urls, path: str, body: dict[str, Any]) -> tuple[requests.Response, requests.Response]:
    return both(urls, {"model": urls.model, **body} if path in (CHAT, COMPLETIONS) else body, path)


@pytest.mark.parametrize(("path", "body"), ANSWERED, ids=range(len(ANSWERED)))
def test_answers_are_those_of_the_engine(urls: Urls, path: str, body: dict[str, Any]) -> None:
    ours, own = asked(urls, path, body)
    assert (ours.status_code, own.status_code) == (200, 200), (ours.text, own.text)
    assert steady(ours.json()) == steady(own.json())
    assert ours.headers["Content-Type"] == own.headers["Content-Type"]


def null_and_default_bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a body for null and for the default of each field that the installed SGLang has. At ``top_k`` 1 all answers are greedy."""
    greedy = GREEDY | {"top_k": 1}
    source = sglang_source(environment.python(make=False))
    for name, default in {**field_defaults(source), "model": None, "unknown": None}.items():
        for value in dict.fromkeys((None, default)):
            outer, _, inner = name.rpartition(".")
            fields = {"sampling_params": greedy | {inner: value}} if outer else {"sampling_params": greedy, name: value}
            yield f"{name}: {value!r}", {"input_ids": [11, 22, 33], **fields}


def summary(reply: requests.Response, *, is_greedy: bool) -> tuple[int, Any]:
    """Return the answer; of one whose tokens were drawn at random, the names of its fields."""
    answer = reply.json()
    return reply.status_code, steady(answer) if is_greedy else (set(answer), set(answer["meta_info"]))


def test_null_and_default_of_every_field_that_the_engine_accepts_pass_unchanged(urls: Urls) -> None:
    accepted, changed = 0, []
    for name, body in null_and_default_bodies():
        ours, own = both(urls, body)
        if own.status_code != 200:
            continue
        accepted += 1
        is_greedy = (body["sampling_params"] or {}).get("top_k") == 1
        if ours.status_code != 200 or summary(ours, is_greedy=is_greedy) != summary(own, is_greedy=is_greedy):
            changed.append((name, ours.status_code, ours.text))
    assert changed == []
    assert accepted > 80, "the fields come from the source of SGLang"


@pytest.mark.parametrize("model", [None, "other", "", 5])
@pytest.mark.parametrize("prompts", [[11, 22], [[11, 22], [33]]], ids=["one", "batch"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_the_engine_ignores_is_ignored(urls: Urls, model: object, prompts: list[Any], stream: bool) -> None:
    """sglang_router adds ``"model": null`` to every body."""
    ours, own = both(urls, {"input_ids": prompts, "model": model, "stream": stream, "sampling_params": GREEDY})
    assert (ours.status_code, own.status_code) == (200, 200), ours.text
    if stream:
        assert ours.text.count("data: {") > 0
    else:
        assert steady(ours.json()) == steady(own.json())


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        (GENERATE, sampled() | {"lora_path": "other"}, "LoRA"),
        (GENERATE, sampled(temperature=-1.5), "temperature"),
        (GENERATE, sampled(structural_tag="x"), "structural_tag"),
        (GENERATE, sampled(logit_bias={"99999": 1.0}), "logit_bias"),
        (GENERATE, sampled(logit_bias={"7": 1.0}, bogus=1), "bogus"),
        (GENERATE, {"sampling_params": GREEDY}, "text, input_ids"),
        (GENERATE, {"input_ids": [5], "sampling_params": {"max_new_tokens": 99999}}, "maximum context length"),
        (GENERATE, sampled() | {"return_hidden_states": True}, "hidden"),
        (CHAT, MESSAGES | {"max_tokens": 99999}, "max_completion_tokens"),
        (COMPLETIONS, PROMPT | {"lora_path": "other"}, "LoRA"),
        (SCORE, {"query": "alpha", "items": ["beta"]}, "label_token_ids"),
        ("/classify", {"text": "alpha"}, "--is-embedding"),
        ("/get_weights_by_name", {"name": "nosuch"}, "Get parameter by name failed"),
    ],
)
def test_refusals_are_those_of_the_engine(urls: Urls, path: str, body: dict[str, Any], word: str) -> None:
    ours, own = asked(urls, path, body)
    assert (ours.status_code, ours.text) == (own.status_code, own.text)
    assert ours.status_code == 400
    assert word in ours.text


def whole(reply: requests.Response) -> tuple[Any, Any]:
    """Return the text and the end of a stream. The number of tokens in an event varies with the load."""
    assert (reply.status_code, reply.headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8"), reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    if "choices" not in events[0]:
        return steady(events[-1]), None
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + (
                choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            )
    reasons = [(choice["index"], choice["finish_reason"]) for event in events for choice in event["choices"] if choice["finish_reason"]]
    return texts, (sorted(reasons), events[-1].get("usage"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, IDS),
        (GENERATE, sampled(logit_bias={"7": 100.0})),
        (GENERATE, IDS | {"return_logprob": True, "top_logprobs_num": 2}),
        (CHAT, MESSAGES),
        (CHAT, MESSAGES | {"n": 2, "stream_options": {"include_usage": True}}),
        (CHAT, MESSAGES | {"n": 12}),
        (COMPLETIONS, PROMPT),
        (COMPLETIONS, PROMPT | {"prompt": [11, 22]}),
    ],
)
def test_streams_are_those_of_the_engine(urls: Urls, path: str, body: dict[str, Any]) -> None:
    ours, own = asked(urls, path, body | {"stream": True})
    assert whole(ours) == whole(own)


def test_the_list_of_models_is_that_of_the_engine(urls: Urls) -> None:
    ours, own = (requests.get(f"{url}/v1/models", timeout=10).json() for url in (urls.fleet, urls.engines[0]))
    assert steady(ours) == steady(own)
    assert [model["id"] for model in ours["data"]] == [model["id"] for model in own["data"]]
    ours, own = (requests.get(f"{url}/v1/models/{urls.model}", timeout=10).json() for url in (urls.fleet, urls.engines[0]))
    assert (steady(ours), ours["id"]) == (steady(own), own["id"])


@pytest.mark.parametrize("more", [{}, {"logit_bias": {"7": 100.0}}], ids=["smg", "direct"])
def test_an_abort_by_rid_ends_a_request_on_any_engine(urls: Urls, more: dict[str, Any]) -> None:
    params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 2000, **more}
    with ThreadPoolExecutor(1) as pool:
        for number in range(2):  # engines are asked in turn
            rid = f"long-{number}-{time.monotonic_ns()}"
            body = {"input_ids": [11], "rid": rid, "sampling_params": params}
            asked = pool.submit(requests.post, f"{urls.fleet}/generate", json=body, timeout=120)
            end = time.monotonic() + 30
            while not asked.done() and time.monotonic() < end:  # until it has begun
                assert requests.post(f"{urls.fleet}/abort_request", json={"rid": rid}, timeout=30).status_code == 200
                time.sleep(0.1)
            reply = asked.result(60)
            assert reply.status_code == 200, reply.text
            assert reply.json()["meta_info"]["finish_reason"]["type"] == "abort"
