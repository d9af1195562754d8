"""Answers to aborted requests, in the shapes of SGLang 0.5.23."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_rollout.batches.aborted import AbortedError, Form, encode_answer, encode_samples, read_form
from sglang_rollout.sglang.api import CHAT_COMPLETIONS, COMPLETIONS, GENERATE


def error(form: Form) -> AbortedError:
    return AbortedError(form, "7", 1.5)


def test_a_sample_has_the_fields_of_an_abort_in_sglangs_queue() -> None:
    meta: dict[str, Any] = {
        "id": "r",
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "weight_version": "7",
        "e2e_latency": 1.5,
        "weight_versions": [{"version": "7", "start": 0, "end": 0}],
        "completion_tokens": 0,
    }
    assert json.loads(encode_samples(error(Form(rid="r")))) == {"text": "", "output_ids": [], "meta_info": meta}
    meta |= {"input_token_logprobs": [], "output_token_logprobs": [], "output_token_logprobs_length": 0}
    assert json.loads(encode_samples(error(Form(rid="r", logprobs=True))))["meta_info"] == meta
    samples = json.loads(encode_samples(error(Form(rid="r", samples=3))))
    assert len({sample["meta_info"]["id"] for sample in samples}) == 3


@pytest.mark.parametrize(
    ("path", "body", "samples"),
    [
        (GENERATE, {"text": "a", "sampling_params": {"n": 3}}, 3),
        (GENERATE, {"text": "a", "sampling_params": {"n": "wrong"}}, 1),
        (GENERATE, {"text": "a", "sampling_params": None}, 1),
        (GENERATE, {"text": "a", "sampling_params": {"n": 10**9}}, 65_536),
        (COMPLETIONS, {"prompt": [5, 6], "n": 2}, 2),
        (COMPLETIONS, {"prompt": [[5], [6]], "n": 2}, 4),
        (COMPLETIONS, {"prompt": "a", "n": 0}, 1),
        (CHAT_COMPLETIONS, {"messages": [], "n": 2}, 2),
    ],
)
def test_an_answer_has_as_many_samples_as_the_request_asks_for(path: str, body: dict[str, Any], samples: int) -> None:
    assert read_form(path, body).samples == samples


@pytest.mark.parametrize(("path", "content"), [(COMPLETIONS, "text"), (CHAT_COMPLETIONS, "message")])
def test_openais_answer_names_the_abort_in_each_choice(path: str, content: str) -> None:
    kind, body = encode_answer(error(Form(path, "r", samples=2, model="m")))
    found = json.loads(body)
    assert (kind, found["id"], found["model"], found["usage"]["completion_tokens"]) == ("application/json", "r", "m", 0)
    assert [(choice["index"], choice["finish_reason"], content in choice) for choice in found["choices"]] == [
        (0, "abort", True),
        (1, "abort", True),
    ]


USAGE = {"prompt_tokens": 0, "total_tokens": 0, "completion_tokens": 0, "prompt_tokens_details": None}
USAGE |= {"reasoning_tokens": 0, "completion_tokens_details": None}
METADATA = {"weight_version": "7", "weight_versions": [{"version": "7", "start": 0, "end": 0}]}
END = {"index": 0, "logprobs": None, "finish_reason": "abort", "matched_stop": None}
RECORDED: dict[tuple[str, bool], list[dict[str, Any]]] = {
    (CHAT_COMPLETIONS, False): [
        {
            "object": "chat.completion",
            "choices": [{**END, "message": {"role": "assistant", "content": "", "reasoning_content": None}}],
            "usage": USAGE,
            "metadata": METADATA,
        }
    ],
    (CHAT_COMPLETIONS, True): [
        {
            "object": "chat.completion.chunk",
            "choices": [{**END, "delta": {"reasoning_content": None, "role": "assistant", "content": ""}, "finish_reason": None}],
        },
        {"object": "chat.completion.chunk", "choices": [{**END, "delta": {"reasoning_content": None}}]},
    ],
    (COMPLETIONS, False): [{"object": "text_completion", "choices": [{**END, "text": ""}], "usage": USAGE, "metadata": METADATA}],
    (COMPLETIONS, True): [{"object": "text_completion", "choices": [{**END, "text": ""}], "usage": None}],
}
"""Answers of SGLang 0.5.23 to requests that were aborted in its queue, without the fields that differ between requests."""


@pytest.mark.parametrize(("path", "stream"), RECORDED)
def test_openais_answers_are_those_that_sglang_gave(path: str, stream: bool) -> None:
    _, body = encode_answer(error(Form(path, stream=stream, model="m")))
    parts = [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part not in (b"", b"data: [DONE]")]
    found = [json.loads(part) for part in parts]
    assert all({part.pop("model"), *map(type, (part.pop("id"), part.pop("created")))} == {"m", str, int} for part in found)
    assert found == RECORDED[path, stream]


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS, CHAT_COMPLETIONS])
@pytest.mark.parametrize("samples", [1, 2])
def test_a_stream_has_an_event_for_each_sample_and_an_end(path: str, samples: int) -> None:
    kind, body = encode_answer(error(Form(path, samples=samples, stream=True)))
    *events, end = [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part]
    ends = [event for event in map(json.loads, events) if path == GENERATE or event["choices"][0]["finish_reason"] == "abort"]
    assert (kind.partition(";")[0], end, len(ends)) == ("text/event-stream", b"[DONE]", samples)
