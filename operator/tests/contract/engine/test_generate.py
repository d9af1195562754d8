"""Contract of an engine: tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests

from tests.contract.support.engine_servers import TIMES, Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

META = {
    "id", "finish_reason", "prompt_tokens", "weight_version", "num_retractions", "reasoning_tokens", "completion_tokens", "cached_tokens",
    "weight_versions", "cached_tokens_details", "dp_rank", "e2e_latency",
}  # fmt: skip
LOGPROBS = {"input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"}


def test_generate(engine: Server) -> None:
    reply = engine.generate(4)
    assert set(reply) == {"text", "output_ids", "meta_info"}
    meta = reply["meta_info"]
    assert set(meta) - TIMES == META
    assert (len(reply["output_ids"]), meta["completion_tokens"], meta["prompt_tokens"]) == (4, 4, 3)
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert meta["weight_version"] == engine.label()
    assert meta["weight_versions"] == [{"version": engine.label(), "start": 0, "end": 4}]
    assert engine.generate(4)["output_ids"] == reply["output_ids"]
    assert engine.generate(0)["output_ids"] == []
    assert engine.generate(2, rid="mine")["meta_info"]["id"] == "mine"


def test_generate_with_logprobs(engine: Server) -> None:
    reply = engine.generate(3, return_logprob=True)
    meta = reply["meta_info"]
    assert set(meta) - TIMES == META | LOGPROBS
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in reply["output_ids"]]
    assert all(entry[0] <= 0 for entry in meta["output_token_logprobs"])
    assert (meta["output_token_logprobs_length"], meta["input_token_logprobs"]) == (3, [])
    first = engine.generate(1, return_logprob=True, logprob_start_len=0)["meta_info"]["input_token_logprobs"]
    assert [entry[1:] for entry in first] == [[11, None], [22, None], [33, None]]
    assert first[0][0] is None


def test_generate_for_many(engine: Server) -> None:
    params = {"temperature": 0, "max_new_tokens": 2}
    texts = engine.post("/generate", {"text": ["alpha", "beta"], "sampling_params": params})[1]
    assert [set(reply) for reply in texts] == [{"text", "output_ids", "meta_info"}] * 2
    ids = engine.post("/generate", {"input_ids": [[5, 6], [7]], "sampling_params": [params, {**params, "max_new_tokens": 1}]})[1]
    assert [(len(reply["output_ids"]), reply["meta_info"]["prompt_tokens"]) for reply in ids] == [(2, 2), (1, 1)]
    twice = engine.post("/generate", {"text": "alpha", "sampling_params": {**params, "n": 2}})[1]
    assert [reply["output_ids"] for reply in twice] == [texts[0]["output_ids"]] * 2
    one = engine.post("/generate", {"text": "alpha", "sampling_params": params})[1]
    assert (one["text"], one["output_ids"]) == (texts[0]["text"], texts[0]["output_ids"])


FEW = {"temperature": 0, "max_new_tokens": 2}


@pytest.mark.parametrize(
    ("fields", "samples"),
    [
        ({"text": "a", "sampling_params": FEW | {"n": 1}}, None),
        ({"text": "a", "sampling_params": FEW | {"n": -1}}, None),
        ({"text": "a", "sampling_params": FEW | {"n": 3}}, 3),
        ({"input_ids": [5, 6], "rid": "mine", "return_logprob": True, "sampling_params": FEW | {"n": 3}}, 3),
        ({"text": "a", "sampling_params": [FEW | {"n": 2}]}, 2),
        ({"text": ["a"], "sampling_params": FEW | {"n": 1}}, 1),
        ({"text": ["a", "b"], "rid": ["x", "y"], "sampling_params": [FEW | {"n": 2}] * 2}, 4),
    ],
    ids=range(7),
)
def test_generate_several_samples(engine: Server, fields: dict[str, Any], samples: int | None) -> None:
    """The answer is one object, or a list of samples in the order of the prompts, each with a new ID."""
    status, reply = engine.post("/generate", fields)
    assert status == 200, reply
    assert isinstance(reply, dict) == (samples is None)
    found = [reply] if samples is None else reply
    assert len(found) == (samples or 1)
    each = len(found) // (2 if fields.get("text") == ["a", "b"] else 1)
    for first in range(0, len(found), each):
        assert len({str(sample["output_ids"]) for sample in found[first : first + each]}) == 1, "greedy samples of one prompt"
    ids = {sample["meta_info"]["id"] for sample in found}
    assert (len(ids), ids & {"mine", "x", "y"}) == (len(found), set())
    assert all(set(sample) == {"text", "output_ids", "meta_info"} for sample in found)


@pytest.mark.parametrize(
    ("n", "type_name"), [("4", 'string "4"'), (True, "boolean `true`"), (4.0, "floating point `4.0`"), ([2], "sequence"), ({}, "map")]
)
def test_generate_refuses_an_n_that_is_no_integer(engine: Server, n: object, type_name: str) -> None:
    for text in ("a", ["a", "b"]):
        answer = engine.post("/generate", {"text": text, "sampling_params": FEW | {"n": n}})
        assert answer == (400, {"error": f"invalid type: {type_name}, expected i64"})


def test_generate_with_an_n_that_sglang_does_not_expect(engine: Server) -> None:
    params: Any
    for text, params in (("a", {"n": None}), (["a", "b"], {"n": 0}), (["a", "b"], {"n": -1}), ("a", [{"n": 1}]), ("a", [])):
        assert engine.post("/generate", {"text": text, "sampling_params": params}) == (500, "Internal Server Error"), params
    differ = engine.post("/generate", {"text": ["a", "b"], "sampling_params": [FEW, FEW | {"n": 2}]})
    assert differ == (400, {"error": {"message": "The parallel_sample_num should be the same for all samples in sample params."}})


def test_generate_stops_at_a_token(engine: Server) -> None:
    second = engine.generate(2)["output_ids"][1]
    params = {"temperature": 0, "max_new_tokens": 8, "stop_token_ids": [second]}
    reply = engine.generate(sampling_params=params)
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": second}
    assert reply["output_ids"][-1] == second
    assert reply["text"] == engine.generate(reply["output_ids"].index(second))["text"]


def test_generate_as_a_stream(engine: Server) -> None:
    body = {"input_ids": [11, 22, 33], "stream": True, "sampling_params": {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}}
    reply = requests.post(f"{engine.url}/generate", json=body, timeout=30)
    assert (reply.status_code, reply.headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
    *events, done, rest = reply.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    parts = [json.loads(event.removeprefix("data: ")) for event in events]
    whole = engine.generate(3)
    # A busy server combines tokens into one event. Each event has all tokens so far.
    counts = [len(part["output_ids"]) for part in parts]
    assert counts == sorted(set(counts))
    assert counts[-1] == 3
    assert (parts[-1]["text"], parts[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    assert [part["meta_info"]["finish_reason"] for part in parts] == [*[None] * (len(parts) - 1), {"type": "length", "length": 3}]
    for part in parts[:-1]:
        assert set(part["meta_info"]) - TIMES == META - {"weight_versions", "e2e_latency"}
    assert set(parts[-1]["meta_info"]) - TIMES == META


def test_batch_numbers_its_request_id(engine: Server) -> None:
    replies = engine.post("/generate", {"text": ["a", "b"], "rid": "mine", "sampling_params": FEW})[1]
    assert [reply["meta_info"]["id"] for reply in replies] == ["mine_0", "mine_1"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"sampling_params": {}}, "Either text, input_ids or input_embeds should be provided."),
        ({"input_ids": []}, "input_ids cannot be empty."),
        ({"text": "a", "sampling_params": {"logit_bias": {"-1": 0.0}}}, "logit_bias must has keys in [0, 2047], got -1."),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens must be at least 0, got -1."),
        ({"text": "a", "sampling_params": {"stop": ["a"] * 33}}, "at most 32 stop strings are allowed, got 33"),
        ({"text": "a", "sampling_params": {"stop_regex": ["a"] * 33}}, "at most 32 stop_regex patterns are allowed, got 33"),
        ({"text": "a", "sampling_params": {"stop_regex": "é" + "a" * 255}}, "stop_regex is 257 bytes, over the 256-byte limit"),
        (
            {"input_ids": [5], "sampling_params": {"max_new_tokens": 99999}},
            "Requested token count exceeds the model's maximum context length of 2048 tokens. You requested a total of 100000 tokens: "
            "1 tokens from the input messages and 99999 tokens for the completion. "
            "Please reduce the number of tokens in the input messages or the completion to fit within the limit.",
        ),
    ],
)
def test_generate_refuses(engine: Server, body: dict[str, Any], message: str) -> None:
    assert engine.post("/generate", body) == (400, {"error": {"message": message}})


def test_generate_takes_as_many_and_as_long_stops_as_sglang(engine: Server) -> None:
    stops = {"stop": ["zzz"] * 32, "stop_regex": ["z" * 256, *["zzz"] * 31]}
    assert engine.post("/generate", {"text": "a", "sampling_params": {**FEW, **stops}})[0] == 200


def test_generate_refuses_an_unknown_sampling_parameter_but_not_an_unknown_field(engine: Server) -> None:
    status, body = engine.post("/generate", {"text": "a", "sampling_params": {"bogus": 1}})
    assert (status, body["error"].startswith("unknown field `bogus`, expected one of `max_new_tokens`, `stop`")) == (400, True)
    assert engine.generate(1, bogus=1)["meta_info"]["completion_tokens"] == 1
