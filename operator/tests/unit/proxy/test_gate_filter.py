"""The gate's filter of request bodies, which arrive in pieces of any size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.api.limits_spec import Limits, MediaUrls
from sglang_rollout.proxy.gate_map import NO_VERSION, encode_adapters
from sglang_rollout.sglang.sampling_types import SAMPLING_TYPES
from tests.support.guard_filter import run

pytestmark = pytest.mark.router

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
CLASSIFY, EMBEDDINGS, SCORE = "/classify", "/v1/embeddings", "/v1/score"
RANGE = "; this model's tokens are 0 to 2047."
SUPPRESSED = ", and SGLang ends when it suppresses this token for min_new_tokens."
LARGE = "top_k is larger than 2147483647; use -1 for the whole vocabulary."
NEVER = "positional_embed_overrides is not offered here: it ends the engine's process."
PNG = "iVBORw0KGgo".ljust(600, "x")
NO_PATH = "image_data names a file: send its content, as a data: URL or in base64."
INDICES = "multi_item_delimiter_indices"
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
    (GENERATE, {"text": "a", "token_indices_to_pool": [99999]}, NEVER.replace("positional_embed_overrides", "token_indices_to_pool")),
    (CLASSIFY, {"text": "a", "multi_item_delimiter_indices": [[9]]}, NEVER.replace("positional_embed_overrides", INDICES)),
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

FOREVER = "stop_regex may take forever: write it without (?, references, repeated groups and alternatives in groups."
HIDDEN = "stop_regex has characters that are written as escapes. Write them plainly."
NOT_TEXTS: tuple[Any, ...] = (5, {"a": "b"}, [["a"]], ["a", 5], ["a", None], [{}], True)
NOT_NUMBERS: tuple[Any, ...] = ("1", None, [1], {}, True)
NO_TEXTS = "stop_regex is neither a string nor a list of strings."
EVIL_PATTERNS = [
    *("(.*)*(.*)*!", "(a|a)*$", "(.|..)" * 40 + "!", "(?#[)(.*)*(.*)*!(?#])", "(?x)[a # ]\n(a+)+ # [\n!]", "(a+)+b", "(a){2}", "(a)?b"),
    *("(?:a|b)", "(?i)a", "(?=a)b", "(?P<x>a)", r"(a)\1", r"\N{ASTERISK}", "[]a", "a[", "\\", r"(\()*", "([)])*", "(])*"),
]
REPETITIONS = "The number of repetitions in stop_regex is {}, above the limit of 1; engine.limits.stopRegexRepetitions raises it."


ONE_PROMPT = "{} is a list, and the request has one prompt: write one value."


def sampled(**params: Any) -> dict[str, Any]:
    return {"text": "a", "sampling_params": params}


def types(kind: str) -> list[str]:
    return [key for key, each in SAMPLING_TYPES.items() if each == kind]


REFUSED_SAMPLING: list[tuple[str, Any, str]] = [
    *((GENERATE, sampled(stop_regex=pattern), FOREVER) for pattern in EVIL_PATTERNS),
    *((GENERATE, sampled(stop_regex=["a", pattern, "b"]), FOREVER) for pattern in EVIL_PATTERNS),
    (CHAT, {"messages": [], "stop_regex": EVIL_PATTERNS[0]}, FOREVER),
    (GENERATE, sampled(stop_regex=["a", ".*a|b*"]), REPETITIONS.format(2)),
    (GENERATE, sampled(stop_regex=r"\d+\.\d+"), REPETITIONS.format(2)),
    (GENERATE, sampled(stop_regex=r"[\]*]+]*"), REPETITIONS.format(2)),
    (GENERATE, sampled(stop_regex="(.*)(.*)!"), REPETITIONS.format(2)),
    (GENERATE, sampled(stop_regex='"[^"]*"?'), REPETITIONS.format(2)),
    (CHAT, {"messages": [], "stop_regex": ["x{1,9}y{2}"]}, REPETITIONS.format(2)),
    (GENERATE, '{"text": "a", "sampling_params": {"stop_regex": "a\\u002a"}}', HIDDEN),
    (GENERATE, '{"text": "a", "sampling_params": {"stop_regex": ["a\\u0028"]}}', HIDDEN),
    *((GENERATE, sampled(stop_regex=value), NO_TEXTS) for value in NOT_TEXTS),
    (CHAT, {"messages": [], "stop_regex": ["a", {"b": "c"}]}, NO_TEXTS),
    (GENERATE, sampled(stream_interval="1"), "stream_interval is ?1?: write a number."),
    (GENERATE, sampled(stream_interval=[1]), "stream_interval is no number."),
    (GENERATE, sampled(stop_token_ids={"99999": 1}, min_new_tokens=3), "stop_token_ids is no list of token ids."),
    (GENERATE, sampled(stop_token_ids="5"), "stop_token_ids is no list of token ids."),
    (CHAT, {"messages": [], "stop_token_ids": {"99999": 1}}, "stop_token_ids is no list of token ids."),
    (GENERATE, {"input_ids": {"99999": 1}}, "input_ids is no list of token ids."),
    (GENERATE, {"text": "a", "token_ids_logprob": 5}, "token_ids_logprob is no list of token ids."),
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt is no list of token ids."),
    (GENERATE, {"text": "a", "sampling_params": "x"}, "sampling_params is neither an object nor a list of objects."),
    (CLASSIFY, {"text": "a", "sampling_params": 5}, "sampling_params is neither an object nor a list of objects."),
    *((GENERATE, sampled(**{key: 1}), f"{key} is neither true nor false.") for key in types("boolean")),
    *((GENERATE, sampled(**{key: {"a": 1}}), f"{key} is neither a string nor a list of strings.") for key in types("texts")),
    *((GENERATE, sampled(**{key: [1]}), f"{key} is no number.") for key in types("number")),
    *((GENERATE, sampled(**{key: "{}"}), f"{key} is no object.") for key in types("object")),
    (GENERATE, sampled(stop=["a", ["b"]]), "stop is neither a string nor a list of strings."),
    (GENERATE, sampled(stop=["a", {"b": 1}]), "stop is neither a string nor a list of strings."),
    (GENERATE, sampled(stop=["a", None]), "stop is neither a string nor a list of strings."),
    (GENERATE, {"text": ["a"], "sampling_params": [{}, {"stop": ["]", 5]}]}, "stop is neither a string nor a list of strings."),
    (GENERATE, sampled(logit_bias=["5"]), "logit_bias is no object of numbers."),
    *((GENERATE, sampled(logit_bias={"5": 1, "6": value}), "logit_bias is no object of numbers.") for value in NOT_NUMBERS),
    (GENERATE, sampled(logit_bias={"5": 10**400}), "logit_bias is no object of numbers."),
    (GENERATE, {"text": ["a", "b"], "sampling_params": [{}, {"max_new_tokens": "4"}]}, "max_new_tokens is ?4?: write a number."),
    (GENERATE, sampled(json_schema={"type": "object"}), "json_schema is no string: write the grammar into one."),
    (CLASSIFY, sampled(regex=5), "regex is no string: write the grammar into one."),
    (GENERATE, sampled(is_normalized=True), "is_normalized is refused: SGLang sets it itself."),
    (GENERATE, {"text": "a", "lora_id": "x"}, "lora_id is refused: SGLang sets it itself."),
    (GENERATE, {"text": "a", "return_logprob": True, "top_logprobs_num": [0, -1]}, ONE_PROMPT.format("top_logprobs_num")),
    (GENERATE, {"text": "a", "return_hidden_states": [False]}, ONE_PROMPT.format("return_hidden_states")),
    (GENERATE, {"logprob_start_len": [0], "input_ids": [5, 6]}, ONE_PROMPT.format("logprob_start_len")),
    (GENERATE, {"input_embeds": [[0.5]], "top_logprobs_num": [1]}, ONE_PROMPT.format("top_logprobs_num")),
]

TAKEN: list[tuple[str, Any]] = [
    (GENERATE, sampled(stop_regex=[r"\n+Human:", "[.!?*]", "a|b|c?", r"\*\+x{3}", 'say "', "[^]]+?"], stream_interval=2, top_p=0.5)),
    (GENERATE, sampled(stop_regex="", json_schema=None, temperature=None, max_new_tokens=None, frequency_penalty=-1.5)),
    (GENERATE, sampled(stop_regex=[])),
    (
        GENERATE,
        sampled(stop_regex=[r"(a)(b)\d*", r"\(\|\)+", "[(|)]*", "a*?", "a++", "é+", "\n", "^a$|^b$", r"\[x|y", "{a}b?", "[^]|(]", "()"]),
    ),
    (
        GENERATE,
        sampled(logit_bias={"5": -100, "06": 0.5}, stop=["]", "\\", '"', "{", "é"], custom_params={"stop": 5, "logit_bias": {"a": "b"}}),
    ),
    (GENERATE, sampled(**dict.fromkeys(SAMPLING_TYPES))),
    (GENERATE, {"text": ["a", "b"], "sampling_params": [{"stop": []}, {"stop": "x", "ignore_eos": True, "watermark": {"enabled": False}}]}),
    (GENERATE, {"text": "a", "sampling_params": None, "metadata": {"stop": [5], "logit_bias": {"a": "b"}}}),
    (CHAT, {"messages": [], "stop": [5], "ignore_eos": 1, "stop_token_ids": None}),
    (SCORE, {"query": None, "items": None, "label_token_ids": None}),
    (GENERATE, {"text": ["a"], "top_logprobs_num": [1], "logprob_start_len": [0], "return_hidden_states": [False]}),
    (GENERATE, {"top_logprobs_num": [1, 2], "input_ids": [[5], [6]]}),
    (GENERATE, {"top_logprobs_num": [1], "input_embeds": [[[0.5]]]}),
    (CHAT, {"messages": [], "response_format": {"json_schema": {"schema": {}}}, "temperature": "0.5"}),
    (GENERATE, {"input_ids": [0, 2047]}),
    (GENERATE, {"input_ids": [[1], [2, 3]], "rid": ["99999", "b"], "image_data": ["AAAA9"], "custom": [99999, -1]}),
    (GENERATE, {"text": 'he wrote "input_ids": [99999], ""', "input_ids": None}),
    (GENERATE, {"text": '"'}),
    (GENERATE, {"text": ['say "hi"', "\\", ","], "sampling_params": {"stop": [""], "top_k": -1, "min_new_tokens": 2}}),
    (GENERATE, {"text": "a", "sampling_params": {"stop_token_ids": [99999, -1], "min_new_tokens": 0, "top_k": 100000000}}),
    (GENERATE, {"text": "a", "token_ids_logprob": [99999, -1]}),
    (GENERATE, {"text": "a", "logprob_start_len": -1, "top_logprobs_num": 1024, "positional_embed_overrides": None, "custom_labels": None}),
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


def texts(body: Any) -> list[str]:
    """The ways in which clients write the same body."""
    if isinstance(body.get("sampling_params"), list):
        return [json.dumps(body), json.dumps(body, separators=(",", ":"))]
    merged = {**WHOLE, **body, "sampling_params": {**WHOLE["sampling_params"], **(body.get("sampling_params") or {})}}
    wide = json.dumps(merged, indent=2).replace("\n", " ")
    return [json.dumps(merged), json.dumps(merged, separators=(",", ":")), wide]


def test_request_that_would_end_the_engine_is_refused(tmp_path: Path) -> None:
    """All bodies in one haproxy, because each start of it takes half a second."""
    expected = [(path, text, sentence) for path, body, sentence in [*REFUSED, *((*taken, "") for taken in TAKEN)] for text in texts(body)]
    found = run(tmp_path, [(path, "2048", text) for path, text, _ in expected])
    assert [(path, text, sentence) for (path, text, _), sentence in zip(expected, found, strict=True)] == expected


def test_sampling_parameters_that_sglang_does_not_check_are_refused(tmp_path: Path) -> None:
    rows = [(path, body if isinstance(body, str) else json.dumps(body), sentence) for path, body, sentence in REFUSED_SAMPLING]
    assert run(tmp_path, [(path, "2048", text) for path, text, _ in rows]) == [sentence for _, _, sentence in rows]


def test_values_of_wrong_types_are_limited(tmp_path: Path) -> None:
    limits, many = Limits(values_per_request=16), "The body has more than 16 values; engine.limits.valuesPerRequest raises it."
    level, word = "input_embeds holds numbers at a wrong level.", "input_embeds holds a word or an object: write numbers."
    rows = [
        ({"text": "a", "image_data": [7] * 20}, many),
        ({"text": [None] * 20}, many),
        ({"text": "a", "rid": ["a"] * 20}, many),
        ({"text": "a", "top_logprobs_num": [0.5] * 20}, many),
        ({"text": "a", "images_config": {str(number): 1 for number in range(20)}}, many),
        ({"text": "a", "video_config": [[]] * 20}, many),
        ({"text": ["a"] * 30, "rid": ["a"] * 8}, ""),
        ({"input_ids": [[5] * 30] * 3, "metadata": {str(number): [1] for number in range(7)}}, ""),
        ({"input_ids": [5] * 3 + [[5]]}, "input_ids holds numbers at a wrong level."),
        ({"input_embeds": [0.5] * 3}, level),
        ({"input_embeds": [[0.5], [[0.5]]]}, level),
        ({"input_embeds": [[[[0.5]]]]}, level),
        ({"input_embeds": [[0.5, None]]}, word),
        ({"input_embeds": [[[0.5, 1e-7]], [[-1]]]}, ""),
    ]
    found = run(tmp_path, [(GENERATE, "2048", json.dumps(body)) for body, _ in rows], "?", limits)
    assert found == [sentence for _, sentence in rows]


def test_unknown_vocabulary_refuses_only_impossible_token_ids(tmp_path: Path) -> None:
    bodies = ['{"input_ids": [99999]}', '{"input_ids": [5, -1]}']
    assert run(tmp_path, [(GENERATE, "?", body) for body in bodies]) == ["", "input_ids holds token -1, which no model has."]


SMALL = Limits(
    samples_per_prompt=8, prompts_per_request=4, samples_per_request=16, logprobs_per_token=5, grammar_bytes=64, media_bytes=100,
    request_bytes=4096,
)  # fmt: skip
BASE = '{"text": "a", "sampling_params": {"max_new_tokens": 4}}'
NO_OBJECT = "The body is not a JSON object in UTF-8."
ESCAPED = "A key has letters that are written as escapes. Write keys plainly."


def raises(field: str) -> str:
    return f"; engine.limits.{field} raises it."


ABOVE: list[tuple[str, Any, str, str]] = [
    (GENERATE, {"text": "a", "sampling_params": {"n": 9}}, "n is 9, above the limit of 8", "samplesPerPrompt"),
    (GENERATE, {"text": "a", "sampling_params": {"n": 1e308}}, "n is 1e+308, above the limit of 8", "samplesPerPrompt"),
    (GENERATE, {"text": "a", "sampling_params": {"n": 2**63}}, "n is 9.2233720368548e+18", "samplesPerPrompt"),
    (GENERATE, {"text": "a", "sampling_params": {"beam_width": 9}}, "beam_width is 9", "samplesPerPrompt"),
    (COMPLETIONS, {"prompt": "a", "best_of": 9}, "best_of is 9", "samplesPerPrompt"),
    (COMPLETIONS, {"prompt": "a", "n": 9}, "n is 9", "samplesPerPrompt"),
    (CHAT, {"messages": [], "n": 9}, "n is 9", "samplesPerPrompt"),
    (GENERATE, {"text": ["a"] * 5}, "The number of prompts in text is 5, above the limit of 4", "promptsPerRequest"),
    (GENERATE, {"input_ids": [[1]] * 5}, "The number of prompts in input_ids is 5", "promptsPerRequest"),
    (GENERATE, {"input_embeds": [[[0.5]]] * 5}, "The number of prompts in input_embeds is 5", "promptsPerRequest"),
    (COMPLETIONS, {"prompt": [[1], [2], [3], [4], [5]]}, "The number of prompts in prompt is 5", "promptsPerRequest"),
    (COMPLETIONS, {"prompt": ["a"] * 5}, "The number of prompts in prompt is 5", "promptsPerRequest"),
    (EMBEDDINGS, {"input": [{"text": "a"}] * 5}, "The number of prompts in input is 5", "promptsPerRequest"),
    (SCORE, {"query": "a", "items": ["b"] * 5}, "The number of prompts in items is 5", "promptsPerRequest"),
    ("/v1/rerank", {"query": "a", "documents": ["b"] * 5}, "The number of prompts in documents is 5", "promptsPerRequest"),
    (GENERATE, {"text": ["a"] * 3, "sampling_params": {"n": 6}}, "The number of samples of all prompts is 18", "samplesPerRequest"),
    (GENERATE, {"sampling_params": {"n": 6}, "input_ids": [[1]] * 3}, "The number of samples of all prompts is 18", "samplesPerRequest"),
    (GENERATE, {"text": "a", "top_logprobs_num": 6}, "top_logprobs_num is 6, above the limit of 5", "logprobsPerToken"),
    (GENERATE, {"text": "a", "top_logprobs_num": [5, 6]}, "top_logprobs_num is 6", "logprobsPerToken"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 6}, "logprobs is 6", "logprobsPerToken"),
    (CHAT, {"messages": [], "top_logprobs": 6}, "top_logprobs is 6", "logprobsPerToken"),
    (GENERATE, {"text": "a", "token_ids_logprob": [1] * 6}, "token_ids_logprob has more than 5 tokens", "logprobsPerToken"),
    (GENERATE, {"text": "a", "token_ids_logprob": [[1] * 6]}, "token_ids_logprob has more than 5 tokens", "logprobsPerToken"),
    (GENERATE, {"text": "a", "token_ids_logprob": [[1], [1] * 6]}, "token_ids_logprob has more than 5 tokens", "logprobsPerToken"),
    (SCORE, {"query": "a", "items": "b", "label_token_ids": [1] * 6}, "label_token_ids has more than 5 tokens", "logprobsPerToken"),
]  # fmt: skip

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"enum": ["x" * 40]}}}}}

SIZES: list[tuple[str, Any, str]] = [
    *((GENERATE, {"text": "a", "sampling_params": {key: "x" * 80}}, "grammarBytes") for key in ("json_schema", "regex", "ebnf")),
    (GENERATE, {"text": "a", "sampling_params": {"structural_tag": json.dumps({"a": ["x" * 40, "y" * 40]})}}, "grammarBytes"),
    (GENERATE, {"text": "a", "sampling_params": {"regex": "x" * 40, "ebnf": "y" * 40}}, "grammarBytes"),
    (CHAT, {"messages": [], "response_format": {"type": "json_schema", "json_schema": {"schema": {"a": "x" * 60}}}}, "grammarBytes"),
    (CHAT, {"messages": [], "tools": [TOOL], "tool_choice": "required"}, "grammarBytes"),
    (CHAT, {"messages": [], "tool_choice": {"function": {"name": "f"}}, "tools": [TOOL, {}]}, "grammarBytes"),
    (CHAT, {"messages": [{"role": "system", "tools": [TOOL], "content": ""}], "tool_choice": "required"}, "grammarBytes"),
    (CHAT, {"messages": [], "regex": "x" * 40, "tools": [{"a": "x" * 20}]}, "grammarBytes"),
    (GENERATE, {"text": "a", "image_data": PNG[:120]}, "mediaBytes"),
    (GENERATE, {"text": "a", "image_data": [PNG[:60], {"url": PNG[:60]}]}, "mediaBytes"),
    (GENERATE, {"text": "a", "audio_data": PNG[:60], "video_data": PNG[:60]}, "mediaBytes"),
    (CHAT, {"messages": [{"content": [{"type": "image_url", "image_url": {"url": PNG[:120]}}]}]}, "mediaBytes"),
    (CHAT, {"messages": [{"content": [{"type": "image_url", "image_url": {"url": PNG[:60]}}] * 2}]}, "mediaBytes"),
    (EMBEDDINGS, {"input": [{"text": "a", "image": PNG}]}, "mediaBytes"),
    (GENERATE, {"text": "a " * 2100}, "requestBytes"),
    (GENERATE, {"text": "a", "sampling_params": {"custom_params": {"a": "x" * 4100}}}, "requestBytes"),
]  # fmt: skip

WITHIN: list[tuple[str, Any]] = [
    (GENERATE, {"text": ["a"] * 4, "sampling_params": {"n": 4}, "top_logprobs_num": [5] * 4, "token_ids_logprob": [[1] * 5] * 4}),
    (GENERATE, {"text": "a", "sampling_params": {"n": 8, "beam_width": 8, "custom_params": {"n": 99, "x": {"text": ["b"] * 9}}}}),
    (GENERATE, {"input_ids": [[1]] * 4, "rid": ["r"] * 9, "sampling_params": [{"n": 2, "regex": "x"}] * 4}),
    (GENERATE, {"input_embeds": [[0.5, 1e-3]] * 9, "sampling_params": {"n": None}}),
    (GENERATE, {"text": "a", "image_data": [PNG[:30], {"url": PNG[:20]}], "metadata": "x" * 300}),
    (COMPLETIONS, {"prompt": "a", "n": 8, "best_of": 8, "logprobs": 5, "json_schema": "x" * 40}),
    (CHAT, {"messages": [{"content": "x" * 300}], "n": 8, "metadata": [{"properties": {"n": {"maximum": 99}, "text": ["a"] * 9}}]}),
    (CHAT, {"messages": [{"content": "a", "tools": []}], "tools": [{"n": 99}]}),
    (COMPLETIONS, {"prompt": "a", "tools": [TOOL, TOOL]}),
    (CHAT, {"messages": [], "metadata": [{"properties": {"\u540d\u524d": {}, "^\\d\\w$": {}, "a&b": {}}}], "custom_logit_processor": None}),
    (SCORE, {"query": "a", "items": ["b"] * 4, "label_token_ids": [1] * 5}),
]  # fmt: skip


def test_requests_above_a_limit_are_refused_with_the_field_that_raises_it(tmp_path: Path) -> None:
    rows = [(path, text, sentence, field) for path, body, sentence, field in ABOVE for text in texts(body)]
    rows += [(path, text, "", field) for path, body, field in SIZES for text in texts(body)]
    found = run(tmp_path, [(path, "2048", text) for path, text, _, _ in rows], "?", SMALL)
    for answer, (path, text, sentence, field) in zip(found, rows, strict=True):
        assert answer.startswith(sentence), (path, text, answer)
        assert answer.endswith(raises(field)), (path, text, answer)


def test_requests_within_the_limits_pass(tmp_path: Path) -> None:
    cases = [(path, "2048", text) for path, body in WITHIN for text in texts(body)]
    cases += [(path, "2048", json.dumps(body, ensure_ascii=False)) for path, body in WITHIN]
    assert run(tmp_path, cases, "?", SMALL) == [""] * len(cases)


UNREADABLE: list[tuple[str, str | bytes, str]] = [
    ("/tokenize", '["a"]', NO_OBJECT),
    (GENERATE, '{"a":' * 501, "The body nests deeper than 500 objects."),
    *((GENERATE, BASE.encode(name), NO_OBJECT) for name in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-8-sig")),
    *((GENERATE, body, NO_OBJECT) for body in ("[]", '[{"input_ids": [-1]}]', '"a"', "5", "null", "NaN", " x", "{'text': 1}")),
    (GENERATE, '{"\\u0069nput_ids": [-1]}', ESCAPED),
    (GENERATE, '{"text": "a", "sampling_params": {"\\u006E": 5}}', ESCAPED),
    (GENERATE, '{"text": "a", "sampl\\u0069ng_params": {"n": 5}}', ESCAPED),
    (GENERATE, '{"text": "a", "input\\u005fids": [1]}', ESCAPED),
    *(
        (GENERATE, f'{{"input_ids": [5, {word}]}}', f"input_ids holds {word}: write token ids as whole numbers.")
        for word in ("1e9", "1E9", "5.0", "true", "false", "null", "NaN", "Infinity", "-Infinity", "-1.5")
    ),
    *((GENERATE, f'{{"input_ids": [{"5, " * count}{{}}]}}', "input_ids holds ??: write token ids as whole numbers.") for count in (1, 99)),
    (GENERATE, '{"input_ids": ["99999"]}', "input_ids holds a string: write token ids as numbers."),
    (GENERATE, '{"input_ids": [[5], ["99999"]]}', "input_ids holds a string: write token ids as numbers."),
    (COMPLETIONS, '{"prompt": [5, "99999"]}', "prompt holds a string: write token ids as numbers."),
    (COMPLETIONS, '{"prompt": [["99999"]]}', "prompt holds a string: write token ids as numbers."),
    (COMPLETIONS, '{"prompt": ["a", 99999]}', "prompt holds strings beside other values in one list: use token ids or texts."),
    (SCORE, '{"query": ["99999"], "items": "a"}', "query holds a string: write token ids as numbers."),
    (GENERATE, '{"text": "a", "sampling_params": {"n": "5000"}}', "n is ?5000?: write a number."),
    (GENERATE, '{"text": "a", "sampling_params": {"n": Infinity}}', "n is Infinity: write a number."),
    (CHAT, '{"messages": [], "n": {}}', "n is {: write a number.".replace("{", "?")),
    (GENERATE, '{"text": "a", "top_logprobs_num": ["5"]}', "top_logprobs_num holds a string: write token ids as numbers."),
    (GENERATE, '{"text": "a", "n"' + " " * 100 + ":" + " " * 100 + "{}}", "n is ?: write a number."),
]  # fmt: skip

MANY = "n is 2000, above the limit of 1024" + raises("samplesPerPrompt")

SECOND_VALUE = [
    ('{"input_ids": [-1], "input_ids": [1]}', "input_ids holds token -1" + RANGE),
    ('{"input_ids": [1], "input_ids": [-1]}', "input_ids holds token -1" + RANGE),
    ('{"text": "a", "sampling_params": {"n": 1, "n": 2000}}', MANY),
    ('{"text": "a", "sampling_params": {"n": 2000}, "sampling_params": {}}', MANY),
    ('{"text": "say \\\\", "top_k": 2147483648}', LARGE),
    ('{"text": "\\\\\\"", "top_k": 2147483648}', LARGE),
    ('{"rid": {"a": [{}, {"b": {}}]}, "input_ids": [-1]}', "input_ids holds token -1" + RANGE),
    ('{"text": "a", "top_k": 1e10}', LARGE),
    ('{"text": "a", "logprob_start_len": [0, -5]}', "logprob_start_len is below -1, which means the prompt's end."),
    ('{"input_ids": [4294967296]}', "input_ids holds token 4294967296" + RANGE),
    ('{"input_ids": [9223372036854775808]}', "input_ids holds token 9223372036854775808" + RANGE),
]  # fmt: skip


def test_body_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    rows: list[tuple[str, str | bytes, str]] = [*UNREADABLE, *((GENERATE, body, sentence) for body, sentence in SECOND_VALUE)]
    found = run(tmp_path, [(path, "2048", body) for path, body, _ in rows])
    assert [(body, answer) for (_, body, _), answer in zip(rows, found, strict=True)] == [(body, sentence) for _, body, sentence in rows]


def test_custom_logit_processors_need_engines_that_accept_them(tmp_path: Path) -> None:
    cases = [(path, "2048", text) for path in (GENERATE, COMPLETIONS, CHAT) for text in texts({"custom_logit_processor": "80049"})]
    assert all("engine.acceptFlags" in sentence for sentence in run(tmp_path, cases))
    assert run(tmp_path, cases, processors=True) == [""] * len(cases)


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


def media(value: object) -> list[tuple[str, str, str]]:
    """Return requests with this value at each place of images, audio and video."""
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"detail": "low", "url": value}}]
    bodies = [
        (GENERATE, {"text": "a", "image_data": value, "rid": "/a"}),
        (GENERATE, {"text": "/a", "audio_data": [value, "AAAA"]}),
        (GENERATE, {"text": ["a"], "video_data": [["AAAA", value]], "stream": False}),
        (GENERATE, {"image_data": {"format": "processor_output", "url": value}, "text": "a"}),
        (CHAT, {"messages": [{"role": "user", "content": parts, "name": "a:b"}]}),
        (CHAT, {"messages": [{"content": [{"type": "input_audio", "input_audio": {"data": value, "format": "wav"}}]}]}),
        (EMBEDDINGS, {"input": [{"text": "a.b", "image": value}]}),
    ]
    return [(path, "2048", json.dumps(body)) for path, body in bodies]


@pytest.mark.parametrize(
    "value",
    [
        *("/etc/passwd", "file:///etc/passwd", "FILE:///x", "../x.wav", "x.mp4", "/dev/zero", "x:/etc/passwd", "concat:a|b"),
        *("a" * 60 + ".png", "vmlinuz", "dev/zero", "proc/self/root/" * 9 + "dev/zero"),
    ],
    ids=str,
)
def test_paths_of_media_are_refused(tmp_path: Path, value: str) -> None:
    found = run(tmp_path, media(value), "?", Limits(media_urls=MediaUrls.ALLOWED))
    assert all(sentence.endswith("names a file: send its content, as a data: URL or in base64.") for sentence in found), found


def test_escaped_paths_of_media_are_refused(tmp_path: Path) -> None:
    bodies = [
        f'{{"text": "a", "image_data": "{path}"}}'
        for path in ("\\/etc\\/passwd", "\\u002fetc/passwd", "fi\\u006ce:///x", "dev\\/zero", "proc\\/self\\/root\\/" * 9)
    ]
    found = run(tmp_path, [(GENERATE, "2048", body) for body in bodies])
    assert all(sentence.startswith("image_data names a file") for sentence in found), found


@pytest.mark.parametrize("value", ["http://169.254.169.254/latest", "https://example.org/a.png"])
def test_media_by_url_need_a_setting(tmp_path: Path, value: str) -> None:
    found = run(tmp_path, media(value))
    assert all("is a URL, which the engine would fetch" in sentence for sentence in found), found
    assert run(tmp_path, media(value), "?", Limits(media_urls=MediaUrls.ALLOWED)) == [""] * len(found)


@pytest.mark.parametrize(
    "value",
    ["data:image/png;base64,AAAA", "data:video/mp4;base64,/+8=", "iVBORw0KGgo/+==", "/9j/4AAQSkZJRg", "UklGRiQAAABXQVZF", None],
    ids=str,
)
def test_media_in_the_request_pass(tmp_path: Path, value: str | None) -> None:
    assert run(tmp_path, media(value)) == [""] * len(media(value))
    escaped = [(path, vocabulary, body.replace("data:image/png", "data:image\\/png")) for path, vocabulary, body in media(value)]
    assert run(tmp_path, escaped) == [""] * len(escaped)


@pytest.mark.parametrize(("length", "passes"), [(4092, False), (4096, True)], ids=["short", "long"])
def test_base64_of_an_unknown_format_passes_if_it_is_too_long_for_a_path(tmp_path: Path, length: int, passes: bool) -> None:
    for slash in ("/", "\\/"):
        body = '{"text": "a", "image_data": "' + "Ab+/".replace("/", slash) * (length // 4) + '"}'
        assert run(tmp_path, [(GENERATE, "2048", body)]) == ["" if passes else NO_PATH]
