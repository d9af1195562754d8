"""Requests that engines with the plug-in refuse, with their codes, and requests that pass; in which shape an engine refuses them."""

from __future__ import annotations

import json
from typing import Any

import requests

from sglang_rollout.plugin.refusal import read_refusal

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
ENDS, ABOVE, NOT_ACCEPTED, UNREADABLE = "would_end_the_engine", "above_limit", "not_accepted", "unreadable_body"
BY_RULE, BY_BODY, BY_DECODER, BY_VALIDATION = "rule", "body", "decoder", "validation"
"""What refuses a request: a rule on the parsed request, the check of the JSON, or SGLang's decoder or validation, which come between."""

FEW = {"max_new_tokens": 2, "temperature": 0}
PROMPT = {"model": "m", "max_tokens": 2, "temperature": 0}
ASKED = {**PROMPT, "messages": [{"role": "user", "content": "a"}]}
LONG = "alpha " * 10_000
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"x": "y" * 200_000}}}


def _text(**params: Any) -> dict[str, Any]:
    return {"text": "a", "sampling_params": params}


def _nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    (GENERATE, {"input_ids": [99999]}, ENDS),
    (GENERATE, {"input_ids": [5, -1]}, ENDS),
    (GENERATE, {"input_ids": [[5], [2**31]]}, ENDS),
    (GENERATE, {"text": ["a", "b"], "input_ids": [[5], [99999]]}, ENDS),
    (GENERATE, {"input_ids": [[]]}, ENDS),
    (GENERATE, {"input_ids": [[5], []]}, ENDS),
    (GENERATE, _text(top_k=2**31), ENDS),
    (GENERATE, _text(stop_token_ids=[-7], min_new_tokens=2, max_new_tokens=4), ENDS),
    (GENERATE, {"text": ["a", "b"], "sampling_params": [FEW, {"stop_token_ids": [-7], "min_new_tokens": 2, "max_new_tokens": 4}]}, ENDS),
    (GENERATE, _text(logit_bias={"5": 1e39}), ENDS),
    (GENERATE, _text(stop_regex="(.*)*(.*)*!", max_new_tokens=200), ENDS),
    (GENERATE, _text(stop_regex="a*b*"), ABOVE),
    (GENERATE, _text(n=5000), ABOVE),
    (GENERATE, {"text": ["a"] * 100, "sampling_params": {"n": 1000}}, ABOVE),
    (GENERATE, {"text": ["a"] * 19_000}, ABOVE),
    (GENERATE, _text(json_schema="x" * 200_000), ABOVE),
    (GENERATE, _text(custom_params="x"), UNREADABLE),
    (GENERATE, {"text": LONG}, ABOVE),
    (GENERATE, {"text": "a", "return_logprob": True, "top_logprobs_num": 5000}, ENDS),
    (GENERATE, {"text": "a", "return_logprob": True, "top_logprobs_num": 1500}, ABOVE),
    (GENERATE, {"text": "a", "return_logprob": True, "top_logprobs_num": [1]}, ENDS),
    (GENERATE, {"text": "a", "return_logprob": True, "logprob_start_len": [0]}, ENDS),
    (GENERATE, {"text": "a", "return_logprob": True, "logprob_start_len": -5}, ENDS),
    (GENERATE, {"input_ids": [5], "return_logprob": True, "token_ids_logprob": [5] * 2000}, ABOVE),
    (GENERATE, {"text": "a", "positional_embed_overrides": {"x": 1}}, ENDS),
    (GENERATE, {"input_ids": [5], "custom_labels": {"a": "b"}}, ENDS),
    (GENERATE, {"input_ids": [5], "custom_logit_processor": "x"}, NOT_ACCEPTED),
    (GENERATE, {"input_ids": [5], "lora_id": "x"}, NOT_ACCEPTED),
    (GENERATE, {"input_ids": [5], "image_data": "/etc/passwd"}, NOT_ACCEPTED),
    (GENERATE, {"input_ids": [5], "image_data": ["http://x/y"]}, NOT_ACCEPTED),
    (GENERATE, {"input_embeds": [[1.0]]}, ENDS),
    (GENERATE, {"input_embeds": [[1.0], [1.0, 2.0]]}, UNREADABLE),
    (COMPLETIONS, {**PROMPT, "prompt": [99999]}, ENDS),
    (COMPLETIONS, {**PROMPT, "prompt": [[5], [99999]]}, ENDS),
    (COMPLETIONS, {**PROMPT, "prompt": "a", "n": 5000}, ABOVE),
    (COMPLETIONS, {**PROMPT, "prompt": ["a"] * 100, "n": 1000}, ABOVE),
    (COMPLETIONS, {**PROMPT, "prompt": "a", "logprobs": 5000}, ENDS),
    (COMPLETIONS, {**PROMPT, "prompt": "a", "top_k": 2**31}, ENDS),
    (COMPLETIONS, {**PROMPT, "prompt": "a", "stop_token_ids": [-7], "min_tokens": 2}, ENDS),
    (COMPLETIONS, {**PROMPT, "prompt": "a", "stop_regex": "(.*)*(.*)*!"}, ENDS),
    (COMPLETIONS, {**PROMPT, "prompt": "a", "custom_logit_processor": "x"}, NOT_ACCEPTED),
    (COMPLETIONS, {**PROMPT, "prompt": "a", "json_schema": "x" * 200_000}, ABOVE),
    (CHAT, {**ASKED, "n": 5000}, ABOVE),
    (CHAT, {**ASKED, "logit_bias": {"5": 1e39}}, ENDS),
    (CHAT, {**ASKED, "top_k": 2**31}, ENDS),
    (CHAT, {**ASKED, "logprobs": True, "top_logprobs": 5000}, ENDS),
    (CHAT, {**ASKED, "stop_regex": "(.*)*(.*)*!"}, ENDS),
    (CHAT, {**ASKED, "custom_logit_processor": "x"}, NOT_ACCEPTED),
    (CHAT, {**ASKED, "input_ids": [99999]}, ENDS),
]
"""Path, body, and the code of the rule that refuses the parsed request."""

EMPTY: list[tuple[str, dict[str, Any], str]] = [
    (GENERATE, {"text": ""}, ENDS),
    (GENERATE, {"text": ["a", ""]}, ENDS),
    (COMPLETIONS, {**PROMPT, "prompt": ["a", ""]}, ENDS),
]
"""As HOSTILE. SGLang 0.5.20 refuses them itself."""

HEAVY: list[tuple[str, dict[str, Any], str]] = [
    (GENERATE, {"text": ["a"] * 20_000}, ABOVE),
    (GENERATE, {"text": "a", "x": [[]] * 400_000}, ABOVE),
    (GENERATE, {"text": "a", "x": _nested(300)}, UNREADABLE),
    (COMPLETIONS, {**PROMPT, "prompt": LONG}, ABOVE),
    (COMPLETIONS, {**PROMPT, "prompt": "a", "response_format": SCHEMA}, ABOVE),
    (CHAT, {**PROMPT, "messages": [1] * 300_000}, ABOVE),
    (CHAT, {**PROMPT, "messages": [{"role": "user", "content": LONG}]}, ABOVE),
    (CHAT, {**ASKED, "response_format": SCHEMA}, ABOVE),
]
"""Path, body and code of requests that the check of the JSON refuses."""

WRONG: list[tuple[str, dict[str, Any], str]] = [
    (GENERATE, _text(top_k="x"), BY_DECODER),
    (GENERATE, _text(top_k=2**70), BY_DECODER),
    (GENERATE, _text(temperature=True), BY_DECODER),
    (GENERATE, _text(stop=5), BY_DECODER),
    (GENERATE, _text(stop_token_ids=["a"]), BY_DECODER),
    (GENERATE, _text(logit_bias={"5": "x"}), BY_DECODER),
    (GENERATE, _text(json_schema={}), BY_DECODER),
    (GENERATE, _text(is_normalized=True), BY_DECODER),
    (GENERATE, {"input_ids": [True]}, BY_DECODER),
    (GENERATE, {"text": "a", "sampling_params": 5}, BY_VALIDATION),
    (GENERATE, {"text": ["a", 5]}, BY_VALIDATION),
    (GENERATE, {"input_ids": "abc"}, BY_VALIDATION),
    (GENERATE, {"input_ids": [5, 1.5]}, BY_VALIDATION),
    (GENERATE, {"input_ids": [[5], 5]}, BY_VALIDATION),
    (GENERATE, {"text": "a", "token_ids_logprob": ["a"]}, BY_VALIDATION),
    (COMPLETIONS, {**PROMPT, "prompt": 5}, BY_VALIDATION),
    (COMPLETIONS, {**PROMPT, "prompt": "a", "n": "x"}, BY_VALIDATION),
    (COMPLETIONS, PROMPT, BY_VALIDATION),
    (CHAT, {**PROMPT, "messages": [1]}, BY_VALIDATION),
    (CHAT, PROMPT, BY_VALIDATION),
    (GENERATE, {}, BY_RULE),
    (GENERATE, {"input_ids": []}, BY_RULE),
    (GENERATE, _text(max_new_tokens=-1), BY_RULE),
    (GENERATE, {"text": "a", "lora_path": "x"}, BY_RULE),
    (COMPLETIONS, {**PROMPT, "prompt": ""}, BY_RULE),
    (COMPLETIONS, {**PROMPT, "prompt": "a", "lora_path": "x"}, BY_RULE),
    (CHAT, {**PROMPT, "messages": []}, BY_RULE),
    (CHAT, {**ASKED, "model": "m:adapter"}, BY_RULE),
]
"""Path and body of requests that SGLang itself refuses, without a code, and where. BY_RULE: in the shape of a rule."""

VALID: list[tuple[str, dict[str, Any], int | None]] = [
    (GENERATE, {"text": "a", "sampling_params": FEW}, None),
    (GENERATE, {"text": ["a", "b"], "sampling_params": FEW}, 2),
    (GENERATE, {"input_ids": [5, 6], "sampling_params": FEW}, None),
    (GENERATE, {"input_ids": [[5], [6]], "sampling_params": [FEW, FEW]}, 2),
    (GENERATE, {"text": ["a", "b"], "sampling_params": {**FEW, "n": 2}}, 4),
    (GENERATE, {"text": []}, 0),
    (GENERATE, {"text": "a", "sampling_params": {**FEW, "stop_regex": "zzz*", "top_k": -1, "logit_bias": {"5": -100}}}, None),
    (GENERATE, {"text": ["a", "b"], "return_logprob": True, "top_logprobs_num": [1, 2], "sampling_params": FEW}, 2),
    (COMPLETIONS, {**PROMPT, "prompt": "a"}, 1),
    (COMPLETIONS, {**PROMPT, "prompt": ["a", "b"], "n": 2}, 4),
    (COMPLETIONS, {**PROMPT, "prompt": [5, 6], "logprobs": 1}, 1),
    (COMPLETIONS, {**PROMPT, "prompt": [[5], [6]]}, 2),
    (CHAT, ASKED, 1),
    (CHAT, {**ASKED, "n": 2, "logprobs": True, "top_logprobs": 1}, 2),
    (CHAT, {**PROMPT, "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}]}, 1),
]
"""Path, body and number of samples of requests that pass; None: the answer is one sample and no list."""


def send(url: str, path: str, body: Any, *, stream: bool) -> tuple[int, Any]:
    """Return the status, and the answer: JSON, text, or the JSON of the events of a stream."""
    reply = requests.post(url + path, json={**body, "stream": True} if stream else body, timeout=60)
    kind = reply.headers["Content-Type"]
    if not kind.startswith("text/event-stream"):
        return reply.status_code, reply.json() if kind.startswith("application/json") else reply.text
    *events, done, rest = reply.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return reply.status_code, [json.loads(event.removeprefix("data: ")) for event in events]


def expect_refusal(path: str, where: str, *, stream: bool) -> tuple[int, Any]:
    """Return status and answer of a refused request, with MESSAGE for the message."""
    if where == BY_DECODER:
        return 400, {"error": "MESSAGE"}
    if where == BY_RULE and path == GENERATE and stream:
        return 200, [{"error": {"message": "MESSAGE", "type": "invalid_request_error", "code": 400, "retryable": False}}]
    if where == BY_RULE and path == GENERATE:
        return 400, {"error": {"message": "MESSAGE"}}
    kind = {BY_RULE: "BadRequestError", BY_BODY: "400", BY_VALIDATION: "Bad Request"}[where]
    return 400, {"object": "error", "message": "MESSAGE", "type": kind, "param": None, "code": 400}


def take_message(answer: Any) -> tuple[Any, str]:
    """Return a refusal with MESSAGE for its message, and the message."""
    if isinstance(answer, list):
        found, message = take_message(answer[0])
        return [found, *answer[1:]], message
    if "message" in answer:
        return {**answer, "message": "MESSAGE"}, answer["message"]
    error = answer["error"]
    return ({"error": {**error, "message": "MESSAGE"}}, error["message"]) if isinstance(error, dict) else ({"error": "MESSAGE"}, error)


def code_of(message: str) -> str | None:
    """Return the plug-in's code in a message."""
    refusal = read_refusal(message)
    return refusal.code if refusal else None


def code_in(answer: Any) -> str | None:
    """Return the plug-in's code in an answer."""
    return code_of(take_message(answer)[1])


SAMPLE = {"text", "output_ids", "meta_info"}
CHOICE = {"index", "logprobs", "finish_reason", "matched_stop"}
CONTENT = {(COMPLETIONS, False): "text", (COMPLETIONS, True): "text", (CHAT, False): "message", (CHAT, True): "delta"}
HEAD = {"id", "object", "created", "model", "choices"}
LOGPROBS = {COMPLETIONS: {"text_offset", "token_logprobs", "tokens", "top_logprobs"}, CHAT: {"content"}}


def count_samples(path: str, answer: Any, *, stream: bool) -> int | None:
    """Return the number of samples of an answer in SGLang's or OpenAI's shape; None for one sample and no list. Check its fields."""
    if path == GENERATE:
        return _count_generated(answer, stream=stream)
    events = answer if stream else [answer]
    for event in events:
        assert set(event) == HEAD | ({"usage"} if path == COMPLETIONS and stream else set() if stream else {"usage", "metadata"})
        for choice in event["choices"]:
            assert set(choice) == CHOICE | {CONTENT[path, stream]}
            assert choice["logprobs"] is None or set(choice["logprobs"]) == LOGPROBS[path]
    choices = [choice for event in events for choice in event["choices"]]
    assert {choice["finish_reason"] for choice in choices} <= {None, "length"}
    return len({choice["index"] for choice in choices if choice["finish_reason"]})


def _count_generated(answer: Any, *, stream: bool) -> int | None:
    samples = answer if isinstance(answer, list) else [answer]
    indices = {sample.get("index") for sample in samples if sample["meta_info"]["finish_reason"]}
    assert all(set(sample) - {"index"} == SAMPLE for sample in samples)
    if stream:
        return None if indices == {None} else len(indices)
    return None if isinstance(answer, dict) else len(samples)
