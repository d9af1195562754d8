"""The gate's filter of request bodies, which arrive in pieces of any size."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.proxy.cli import find_haproxy
from sglang_rollout.proxy.config import guard_text
from sglang_rollout.proxy.gate_map import NO_VERSION, encode_adapters

pytestmark = pytest.mark.router

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
CLASSIFY, EMBEDDINGS, SCORE = "/classify", "/v1/embeddings", "/v1/score"
RANGE = "; this model's tokens are 0 to 2047."
SUPPRESSED = ", and SGLang dies of suppressing it until the least number of tokens is there."
LARGE = "top_k is larger than 2147483647; use -1 for the whole vocabulary."
NEVER = "positional_embed_overrides is not offered here: it ends the engine's process."
EMPTY = " is empty: give at least one token."
WHOLE: dict[str, Any] = {"sampling_params": {"max_new_tokens": 4, "temperature": 0.5, "stop": ["", "x"]}, "stream": False}

REFUSED: list[tuple[str, Any, str]] = [
    (GENERATE, {"input_ids": [5, 2048, 6]}, "input_ids holds token 2048" + RANGE),
    (GENERATE, {"input_ids": [99999]}, "input_ids holds token 99999" + RANGE),
    (GENERATE, {"input_ids": [5, -1]}, "input_ids holds token -1" + RANGE),
    (GENERATE, {"rid": "a", "input_ids": [[1, 2], [3, 18446744073709551616]]}, "input_ids holds token 18446744073709551616" + RANGE),
    (GENERATE, {"input_ids": [[5], []]}, "input_ids" + EMPTY),
    (GENERATE, {"text": ""}, "text" + EMPTY),
    (GENERATE, {"text": ["a", ""]}, "text" + EMPTY),
    (GENERATE, {"text": "a", "input_ids": []}, "input_ids" + EMPTY),
    (GENERATE, {"text": "a", "sampling_params": {"top_k": 2147483648}}, LARGE),
    (GENERATE, {"text": "a", "top_logprobs_num": 2049}, "top_logprobs_num is larger than the vocabulary of 2048 tokens."),
    (GENERATE, {"text": "a", "logprob_start_len": -2}, "logprob_start_len is below -1, which means the prompt's end."),
    (
        GENERATE,
        {"text": "a", "sampling_params": {"min_new_tokens": 2, "stop_token_ids": [7, -7]}},
        "stop_token_ids holds token -7; this model's tokens are 0 to 2047" + SUPPRESSED,
    ),
    (
        CHAT,
        {"messages": [], "stop_token_ids": [99999], "min_tokens": 1},
        "stop_token_ids holds token 99999; this model's tokens are 0 to 2047" + SUPPRESSED,
    ),
    (GENERATE, {"text": "a", "positional_embed_overrides": {"x": 1}}, NEVER),
    (GENERATE, {"text": "a", "custom_labels": {"team": "a"}}, NEVER.replace("positional_embed_overrides", "custom_labels")),
    (COMPLETIONS, {"prompt": [4, 4096]}, "prompt holds token 4096" + RANGE),
    (COMPLETIONS, {"prompt": [[4], [-3]]}, "prompt holds token -3" + RANGE),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt" + EMPTY),
    (COMPLETIONS, {"prompt": "a", "logprobs": 100000}, "logprobs is larger than the vocabulary of 2048 tokens."),
    (CHAT, {"messages": [], "top_logprobs": 100000}, "top_logprobs is larger than the vocabulary of 2048 tokens."),
    (CHAT, {"messages": [], "input_ids": [99999]}, "input_ids holds token 99999" + RANGE),
    (CLASSIFY, {"input_ids": [5, 2048]}, "input_ids holds token 2048" + RANGE),
    (CLASSIFY, {"text": ["a", ""]}, "text" + EMPTY),
    (CLASSIFY, {"text": "a", "sampling_params": {"top_k": 2147483648}}, LARGE),
    ("/encode", {"input_ids": [[]]}, "input_ids" + EMPTY),
    (CLASSIFY, {"text": "a", "embed_overrides": [[[0.5]]]}, NEVER.replace("positional_embed_overrides", "embed_overrides")),
    (EMBEDDINGS, {"model": "m", "input": [[5], [-1]]}, "input holds token -1" + RANGE),
    (EMBEDDINGS, {"model": "m", "input": ["a", ""]}, "input" + EMPTY),
    ("/v1/classify", {"model": "m", "input": [99999]}, "input holds token 99999" + RANGE),
    (SCORE, {"query": [99999], "items": [[5]], "label_token_ids": [1]}, "query holds token 99999" + RANGE),
    (SCORE, {"query": "a", "items": [[5], [-1]], "label_token_ids": [1]}, "items holds token -1" + RANGE),
    (SCORE, {"query": "a", "items": ["b"], "label_token_ids": [99999]}, "label_token_ids holds token 99999" + RANGE),
    (SCORE, {"query": "", "items": ["a", ""]}, "items" + EMPTY),
]  # fmt: skip

TAKEN: list[tuple[str, Any]] = [
    (GENERATE, {"input_ids": [0, 2047]}),
    (GENERATE, {"input_ids": [[1], [2, 3]], "rid": ["99999", "b"], "image_data": ["99999"], "custom": [99999, -1]}),
    (GENERATE, {"text": 'he wrote "input_ids": [99999], ""', "input_ids": None}),
    (GENERATE, {"text": '"'}),
    (GENERATE, {"text": ['say "hi"', "\\", ","], "sampling_params": {"stop": [""], "top_k": -1, "min_new_tokens": 2}}),
    (GENERATE, {"text": "a", "sampling_params": {"stop_token_ids": [99999, -1], "min_new_tokens": 0, "top_k": 100000000}}),
    (GENERATE, {"text": "a", "logprob_start_len": -1, "top_logprobs_num": 2048, "positional_embed_overrides": None, "custom_labels": None}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}], "logprobs": True, "top_logprobs": 5}),
    (CHAT, {"messages": [], "tools": [{"properties": {"input_ids": {"type": "array"}, "top_k": {"type": "integer"}}}]}),
    (COMPLETIONS, {"prompt": "a", "logprobs": None, "suffix": ""}),
    (CLASSIFY, {"text": [["a", "b"], ["c", "99999"]], "embed_overrides": None}),
    (EMBEDDINGS, {"model": "", "input": ["a", "-1, 99999"], "user": ""}),
    (EMBEDDINGS, {"model": "m", "input": [{"text": "a"}, {"text": ""}]}),
    (SCORE, {"query": "", "items": ["a", "99999"], "label_token_ids": [1, 2]}),
    (SCORE, {"query": [], "items": [[5], [6, 7]], "label_token_ids": []}),
    ("/v1/rerank", {"query": "", "documents": ["", "99999"]}),
    ("/tokenize", {"prompt": ["", "a"]}),
    ("/detokenize", {"tokens": [-1, 99999]}),
]


def run(folder: Path, cases: list[tuple[str, str, str]], adapters: str = "?") -> list[str]:
    """The sentence about each body, empty if it passes; the same for all pieces in which it may come."""
    (folder / "guard.lua").write_text(guard_text())
    (folder / "cases").write_text("".join(f"{path} {vocabulary} {adapters} {body}\n" for path, vocabulary, body in cases))
    config = folder / "haproxy.cfg"
    config.write_text(f"global\n    lua-load {Path(__file__).with_name('guard_cases.lua')}\ndefaults\n    mode http\n")
    names = {"GUARD": "guard.lua", "CASES": "cases", "RESULTS": "results"}
    done = subprocess.run(
        [find_haproxy() or "haproxy", "-c", "-f", str(config)],
        env=os.environ | {key: str(folder / name) for key, name in names.items()}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (folder / "results").exists(), done.stderr
    rows = [line.split("\t") for line in (folder / "results").read_text().splitlines()]
    assert len(rows) == len(cases), done.stderr
    for (same, _), case in zip(rows, cases, strict=True):
        assert same == "true", f"the answer depends on how the body is cut: {case}"
    return [sentence for _, sentence in rows]


def texts(body: Any) -> list[str]:
    """The ways in which clients write the same body."""
    merged = {**WHOLE, **body, "sampling_params": {**WHOLE["sampling_params"], **body.get("sampling_params", {})}}
    wide = json.dumps(merged, indent=2).replace("\n", " ")
    return [json.dumps(merged), json.dumps(merged, separators=(",", ":")), wide]


def test_request_that_would_end_the_engine_is_refused(tmp_path: Path) -> None:
    """All bodies in one haproxy, because each start of it takes half a second."""
    expected = [(path, text, sentence) for path, body, sentence in [*REFUSED, *((*taken, "") for taken in TAKEN)] for text in texts(body)]
    found = run(tmp_path, [(path, "2048", text) for path, text, _ in expected])
    assert [(path, text, sentence) for (path, text, _), sentence in zip(expected, found, strict=True)] == expected


def test_unknown_vocabulary_refuses_only_impossible_token_ids(tmp_path: Path) -> None:
    bodies = ['{"input_ids": [99999]}', '{"input_ids": [5, -1]}']
    assert run(tmp_path, [(GENERATE, "?", body) for body in bodies]) == ["", "input_ids holds token -1, which no model has."]


LONG = "a" * 60


@pytest.mark.parametrize(
    ("given", "refused"),
    [("math", ""), ("de/ep", ""), (LONG, ""), (None, ""), (["math", None, "de/ep"], ""), ("", ""), ("é", ""),
     ("other", "other"), ("mat", "mat"), ("math,", "math?"), (LONG + "b", LONG + "b"), (["math", "ö o"], ""), (["math", "o o"], "o o"),
     ("x" * 200, "x" * 100)],
)  # fmt: skip
def test_adapters_that_are_not_loaded_are_refused(given: Any, refused: str, tmp_path: Path) -> None:
    sentence = f"LoRA adapter {refused} is not loaded; GET /fleet lists those that are." if refused else ""
    bodies = [(path, "2048", text) for path in (GENERATE, COMPLETIONS, CHAT) for text in texts({"lora_path": given, "rid": "a"})]
    assert run(tmp_path, bodies, encode_adapters(["math", "de/ep", LONG])) == [sentence] * len(bodies)


def test_sglang_decides_about_adapters_that_are_not_known(tmp_path: Path) -> None:
    body = json.dumps({"text": "a", "lora_path": "other"})
    assert run(tmp_path, [(GENERATE, "2048", body)], NO_VERSION) == [""]
    assert run(tmp_path, [(GENERATE, "2048", body)], encode_adapters([])) != [""]
