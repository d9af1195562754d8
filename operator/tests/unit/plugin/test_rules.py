"""The rules on requests, on objects with the fields of SGLang's own."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_rollout.plugin.patterns import count_repetitions
from sglang_rollout.plugin.refusal import Refusal
from sglang_rollout.plugin.request import Facts
from sglang_rollout.plugin.rules import AFTER_TOKENS, RULES, check
from sglang_rollout.plugin.sampling import SAMPLING_TYPES
from sglang_rollout.plugin.settings import Limits, Settings

FACTS = Facts(vocabulary=2048, context=2048, hidden=4)
REWARD = Facts(vocabulary=2048, context=2048, is_generation=False, generates=False, path="/classify")
SMALL = Settings(
    limits=Limits(
        samples_per_prompt=8, prompts_per_request=4, samples_per_request=16, logprobs_per_token=5, grammar_bytes=64, media_bytes=100
    )
)
PNG = "iVBORw0KGgo".ljust(600, "x")
ENDS, ABOVE, UNREADABLE, NOT_ACCEPTED = "would_end_the_engine", "above_limit", "unreadable_body", "not_accepted"
RANGE = "; this model's tokens are 0 to 2047."
EMPTY = " is empty: give at least one token."
SUPPRESSED = ", and SGLang ends when it suppresses this token for min_new_tokens."
IS_FILE = "image_data names a file: send its content, as a data: URL or in base64."
NEVER = " is not offered here: it ends the engine's process."
INTERNAL = " is refused: SGLang sets it itself."
FOREVER = "stop_regex may take forever: write it without (?, references, repeated groups and alternatives in groups."
ONE = " is a list, and the request has one prompt: write one value."


def judge(body: dict[str, Any], facts: Facts = FACTS, given: Settings | None = None) -> tuple[str, str] | None:
    found = check(RULES, SimpleNamespace(**body), facts, given or Settings())
    return None if found is None else (found.code, found.sentence)


def sampled(**params: Any) -> dict[str, Any]:
    return {"text": "a", "sampling_params": params}


def raises(field: str) -> str:
    return f"; engine.limits.{field} raises it."


@pytest.mark.parametrize(
    ("body", "code", "sentence"),
    [
        ({"input_ids": [5, 2048, 6]}, ENDS, "input_ids holds token 2048" + RANGE),
        ({"input_ids": [5, -1]}, ENDS, "input_ids holds token -1" + RANGE),
        ({"input_ids": [[1, 2], [3, 2**64]]}, ENDS, "input_ids holds token 18446744073709551616" + RANGE),
        ({"text": "a", "input_ids": [2**31]}, ENDS, "input_ids holds token 2147483648" + RANGE),
        ({"text": ["a"], "input_ids": [[5], [-1]]}, ENDS, "input_ids holds token -1" + RANGE),
        ({"input_ids": [10**5000]}, ENDS, "input_ids holds token a huge number" + RANGE),
        ({"input_ids": [[5], []]}, ENDS, "input_ids" + EMPTY),
        ({"text": "a", "input_ids": []}, ENDS, "input_ids" + EMPTY),
        ({"input_ids": [5, True]}, UNREADABLE, "input_ids holds True: write token ids as whole numbers."),
        ({"input_ids": [5, 5.0]}, UNREADABLE, "input_ids holds 5.0: write token ids as whole numbers."),
        ({"input_ids": [5, None]}, UNREADABLE, "input_ids holds None: write token ids as whole numbers."),
        ({"input_ids": ["9<b>"]}, UNREADABLE, "input_ids holds 9?b?: write token ids as whole numbers."),
        ({"input_ids": [[5], {"a": 1}]}, UNREADABLE, "input_ids is no list of token ids."),
        ({"input_ids": [5, [5]]}, UNREADABLE, "input_ids holds list: write token ids as whole numbers."),
        ({"input_ids": [[[5]]]}, UNREADABLE, "input_ids holds list: write token ids as whole numbers."),
        ({"input_ids": {"9": 1}}, UNREADABLE, "input_ids is no list of token ids."),
        ({"input_ids": "5"}, UNREADABLE, "input_ids is no list of token ids."),
        ({"text": 5}, UNREADABLE, "text is neither a string nor a list of strings."),
        ({"text": [["a"]]}, UNREADABLE, "text is neither a string nor a list of strings."),
        ({"text": ["a", None]}, UNREADABLE, "text is neither a string nor a list of strings."),
        (sampled(top_k=2**31), ENDS, "top_k is larger than 2147483647; use -1 for the whole vocabulary."),
        (sampled(top_k=1e10), ENDS, "top_k is larger than 2147483647; use -1 for the whole vocabulary."),
        (sampled(logit_bias={"5": 1e39}), ENDS, "logit_bias has a value outside the numbers of 32 bits."),
        (sampled(logit_bias={"5": -1e300}), ENDS, "logit_bias has a value outside the numbers of 32 bits."),
        (sampled(logit_bias={"5": 10**400}), UNREADABLE, "logit_bias is no object of numbers."),
        ({"text": "a", "top_logprobs_num": 2049}, ENDS, "top_logprobs_num is larger than the vocabulary of 2048 tokens."),
        ({"text": ["a"], "top_logprobs_num": [0, 99999]}, ENDS, "top_logprobs_num is larger than the vocabulary of 2048 tokens."),
        ({"text": "a", "logprob_start_len": -2}, ENDS, "logprob_start_len is below -1, which means the prompt's end."),
        ({"text": ["a"], "logprob_start_len": [0, -5]}, ENDS, "logprob_start_len is below -1, which means the prompt's end."),
        (
            sampled(min_new_tokens=2, stop_token_ids=[7, -7]),
            ENDS,
            "stop_token_ids holds token -7; this model's tokens are 0 to 2047" + SUPPRESSED,
        ),
        ({"text": "a", "top_logprobs_num": [0, -1]}, ENDS, "top_logprobs_num" + ONE),
        ({"text": "a", "return_hidden_states": [False]}, ENDS, "return_hidden_states" + ONE),
        ({"input_ids": [5, 6], "logprob_start_len": [0]}, ENDS, "logprob_start_len" + ONE),
        ({"input_embeds": [[0.5] * 4], "top_logprobs_num": [1]}, ENDS, "top_logprobs_num" + ONE),
        ({"input_embeds": [[0.5] * 5]}, ENDS, "input_embeds has rows of 5 numbers; this model's rows have 4."),
        *(({"text": "a", name: [1]}, ENDS, name + NEVER) for name in ("positional_embed_overrides", "embed_overrides", "custom_labels")),
        *(({"text": "a", name: [1]}, ENDS, name + NEVER) for name in ("token_indices_to_pool", "multi_item_delimiter_indices")),
        *(({"text": "a", name: "x"}, NOT_ACCEPTED, name + INTERNAL) for name in ("lora_id", "http_worker_ipc", "encoder_urls", "kv_hints")),
        *((sampled(**{name: 1}), NOT_ACCEPTED, name + INTERNAL) for name in ("is_normalized", "stop_strs", "stop_regex_max_len")),
        ({"text": "a", "sampling_params": "x"}, UNREADABLE, "sampling_params is neither an object nor a list of objects."),
        ({"text": "a", "sampling_params": [{}, 5]}, UNREADABLE, "sampling_params is neither an object nor a list of objects."),
        (sampled(n="5000"), UNREADABLE, "n is 5000: write a number."),
        (sampled(n=float("inf")), UNREADABLE, "n is inf: write a number."),
        (sampled(temperature=float("nan")), UNREADABLE, "temperature is nan: write a number."),
        (sampled(stream_interval=[1]), UNREADABLE, "stream_interval is no number."),
        (sampled(ignore_eos=1), UNREADABLE, "ignore_eos is neither true nor false."),
        (sampled(stop=["a", 5]), UNREADABLE, "stop is neither a string nor a list of strings."),
        (sampled(stop_regex=[["a"]]), UNREADABLE, "stop_regex is neither a string nor a list of strings."),
        (sampled(stop_token_ids={"9": 1}), UNREADABLE, "stop_token_ids is no list of token ids."),
        (sampled(stop_token_ids=["5"]), UNREADABLE, "stop_token_ids is no list of token ids."),
        (sampled(logit_bias=["5"]), UNREADABLE, "logit_bias is no object of numbers."),
        (sampled(logit_bias={"5": "1"}), UNREADABLE, "logit_bias is no object of numbers."),
        (sampled(json_schema={"type": "object"}), UNREADABLE, "json_schema is no string: write the grammar into one."),
        (sampled(custom_params="{}"), UNREADABLE, "custom_params is no object."),
        ({"text": "a", "token_ids_logprob": 5}, UNREADABLE, "token_ids_logprob is no list of token ids."),
        ({"text": "a", "token_ids_logprob": [[5], "5"]}, UNREADABLE, "token_ids_logprob is no list of token ids."),
        ({"text": "a", "top_logprobs_num": "5"}, UNREADABLE, "top_logprobs_num is 5: write a number."),
        (sampled(stop_regex="(.*)*(.*)*!"), ENDS, FOREVER),
        ({"text": "a " * 20_000}, ABOVE, "text has 40000 characters, which is more than 16 for each of the 2048 tokens of the model's"
         " context."),
        ({"text": "a", "image_data": "/etc/passwd"}, NOT_ACCEPTED, IS_FILE),
        ({"text": "a", "custom_logit_processor": "8004"}, NOT_ACCEPTED, "custom_logit_processor is refused: these engines run no code from"
         " requests. engine.args with --enable-custom-logit-processor, which engine.acceptFlags has to list, allows it."),
    ],
)  # fmt: skip
def test_a_request_is_refused(body: dict[str, Any], code: str, sentence: str) -> None:
    assert judge(body) == (code, sentence)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"text": ""},
        {"text": ["a", ""]},
        {"input_ids": []},
        {"input_ids": [], "session_params": {"id": "s"}},
        {"input_ids": [0, 2047]},
        {"input_ids": [[1], [2, 3]], "rid": ["99999", "b"], "top_logprobs_num": [1, 2]},
        {"input_embeds": [[0.5, 1, -1e-7, 0]] * 9, "sampling_params": None},
        {"input_embeds": [[[0.5] * 4]], "top_logprobs_num": [1]},
        sampled(**dict.fromkeys(SAMPLING_TYPES)),
        sampled(stop_token_ids=[99999, -1], min_new_tokens=0, top_k=100_000_000),
        sampled(stop_regex=[r"\n+Human:", "[.!?*]", "a|b|c?", r"\*\+x{3}", 'say "', "[^]]+?"], stream_interval=2, top_p=0.5),
        sampled(logit_bias={"5": -100, "06": 0.5}, custom_params={"n": 99, "x": {"text": ["b"]}}, n=True),
        {"text": ["a", "b"], "sampling_params": [{"stop": []}, {"stop": "x", "ignore_eos": True, "watermark": {"enabled": False}}]},
        {"text": "a", "sampling_params": [{"n": 2}]},
        {"text": "a", "sampling_params": []},
        {"text": "a", "token_ids_logprob": [99999, -1], "logprob_start_len": -1, "top_logprobs_num": 1024},
        {"text": ["a", "b"], "token_ids_logprob": [[1], None]},
        {"text": "a" * 16 * 2048},
        {"text": "a", "image_data": ["data:image/png;base64,AAAA", PNG, {"url": PNG, "detail": "low"}, SimpleNamespace(url=PNG), None, b"x:"]},  # noqa: E501
        {"text": "a", "video_data": [["AAAA", ""]], "audio_data": "https://x"[:0]},
        {"text": "a", "lora_path": "other"},
        {"text": []},
    ],
)  # fmt: skip
def test_a_request_passes(body: dict[str, Any]) -> None:
    assert judge(body) is None


def test_the_warm_up_and_health_checks_pass() -> None:
    params = {"max_new_tokens": 1, "temperature": 0.0}
    for body in (
        {"rid": "HEALTH_CHECK_1", "input_ids": [0], "sampling_params": params, "log_metrics": False},
        {"text": "The capital city of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 8}},
        {"input_ids": [[10, 11, 12]] * 8, "sampling_params": params},
    ):
        assert judge(body, given=SMALL if "rid" in body else None) is None
        assert judge(body, REWARD) is None


def test_a_reward_model_generates_nothing() -> None:
    assert judge({"text": "a"}, replace(REWARD, generates=True)) == (
        ENDS, "This engine has a reward model, which generates nothing: use /classify or /v1/embeddings."
    )  # fmt: skip
    assert judge({"text": [["a", "b"], ["c", ""]]}, REWARD) is None
    assert judge({"text": [["a", 5]]}, REWARD) is not None


def test_fields_that_sglang_sets_on_a_path_pass_there() -> None:
    body = {"text": "a", "multi_item_delimiter_indices": [[3]]}
    assert judge(body, replace(FACTS, path="/v1/score")) is None
    assert judge(body, replace(FACTS, path="/v1/embeddings")) is not None
    labels = {"text": "a", "custom_labels": {"team": "a"}}
    assert judge(labels, replace(FACTS, path="/v1/chat/completions")) is None
    assert judge(labels, replace(FACTS, path="/vertex_generate")) is not None


@pytest.mark.parametrize(
    ("body", "sentence", "field"),
    [
        (sampled(n=9), "n is 9, above the limit of 8", "samplesPerPrompt"),
        (sampled(n=1e308), "n is 1e+308, above the limit of 8", "samplesPerPrompt"),
        (sampled(n=2**63), "n is 9.2233720368548e+18, above the limit of 8", "samplesPerPrompt"),
        (sampled(beam_width=9), "beam_width is 9, above the limit of 8", "samplesPerPrompt"),
        ({"text": ["a"], "sampling_params": [{"n": 1}, {"n": 9}]}, "n is 9, above the limit of 8", "samplesPerPrompt"),
        ({"text": ["a"] * 5}, "The number of prompts in text is 5, above the limit of 4", "promptsPerRequest"),
        ({"input_ids": [[1]] * 5}, "The number of prompts in input_ids is 5, above the limit of 4", "promptsPerRequest"),
        ({"input_embeds": [[[0.5] * 4]] * 5}, "The number of prompts in input_embeds is 5, above the limit of 4", "promptsPerRequest"),
        ({"text": ["a"] * 3, "sampling_params": {"n": 6}}, "The number of samples of all prompts is 18, above the limit of 16", "samplesPerRequest"),  # noqa: E501
        ({"text": "a", "top_logprobs_num": 6}, "top_logprobs_num is 6, above the limit of 5", "logprobsPerToken"),
        ({"text": "a", "token_ids_logprob": [1] * 6}, "token_ids_logprob has more than 5 tokens", "logprobsPerToken"),
        ({"text": "a", "token_ids_logprob": [[1], [1] * 6]}, "token_ids_logprob has more than 5 tokens", "logprobsPerToken"),
        (sampled(json_schema="x" * 65), "The grammar up to json_schema has more than 64 bytes", "grammarBytes"),
        (sampled(regex="x" * 40, ebnf="é" * 13), "The grammar up to ebnf has more than 64 bytes", "grammarBytes"),
        ({"text": ["a", "b"], "sampling_params": [{"regex": "x" * 40}] * 2}, "The grammar up to regex has more than 64 bytes", "grammarBytes"),  # noqa: E501
        ({"text": "a", "image_data": [PNG[:60], {"url": PNG[:60]}]}, "The media up to image_data has more than 100 bytes", "mediaBytes"),
        ({"text": "a", "audio_data": PNG[:60], "video_data": b"x" * 60}, "The media up to audio_data has more than 100 bytes", "mediaBytes"),  # noqa: E501
        (sampled(stop_regex=["a", ".*a|b*"]), "The number of repetitions in stop_regex is 2, above the limit of 1", "stopRegexRepetitions"),
    ],
)  # fmt: skip
def test_a_request_above_a_limit_names_the_field_that_raises_it(body: dict[str, Any], sentence: str, field: str) -> None:
    assert judge(body, given=SMALL) == (ABOVE, sentence + raises(field))


@pytest.mark.parametrize(
    "body",
    [
        {"text": ["a"] * 4, "sampling_params": {"n": 4}, "top_logprobs_num": [5] * 4, "token_ids_logprob": [[1] * 5] * 4},
        sampled(n=8, beam_width=8, regex="x" * 64),
        {"input_ids": [[1]] * 4, "sampling_params": [{"n": 2, "regex": "x"}] * 4},
        {"text": "a", "image_data": [PNG[:50], {"url": PNG[:50], "detail": "x" * 100}]},
    ],
)
def test_a_request_within_the_limits_passes(body: dict[str, Any]) -> None:
    assert judge(body, given=SMALL) is None


@pytest.mark.parametrize(
    ("given_paths", "refused"),
    [("math", ""), (None, ""), (["math", None, "de/ep"], ""), ("", ""), ("other", "other"), ("mat", "mat"), ("math,", "math?"),
     (["math", "o o"], "o o"), ("x" * 200, "x" * 100), (["math", 5], "5"), ({"a": 1}, "dict")],
)  # fmt: skip
def test_adapters_that_are_not_loaded_are_refused(given_paths: Any, refused: str) -> None:
    sentence = f"LoRA adapter {refused} is not loaded; GET /fleet lists those that are."
    facts = replace(FACTS, adapters=frozenset(("math", "de/ep")))
    assert judge({"text": "a", "lora_path": given_paths}, facts) == (("adapter_not_loaded", sentence) if refused else None)


@pytest.mark.parametrize(
    "place", [lambda x: x, lambda x: [x], lambda x: [["AAAA", x]], lambda x: {"url": x, "format": "/a"}, lambda x: SimpleNamespace(url=x)]
)
@pytest.mark.parametrize(
    ("text", "what"),
    [("/etc/passwd", "file"), ("image.png", "file"), ("file:///etc/x", "file"), ("a", "file"), ("C:\\x", "file"), ("HTTP://x", "file"),
     ("DATA:x", "file"), ("/9x", "file"), ("http://a/b", "url"), ("https://a", "url"), ("data:image/png;base64,x", ""), (PNG, ""),
     ("/9j/" + "x" * 10, ""), ("x" * 5000, ""), ("/" + "x" * 5000, "file"), ("", "")],
)  # fmt: skip
def test_media_come_with_the_request(place: Any, text: str, what: str) -> None:
    sentence = {
        "": None,
        "file": (NOT_ACCEPTED, IS_FILE),
        "url": (NOT_ACCEPTED, "image_data is a URL, which the engine would fetch: send its content as a data: URL, or set engine.limits.mediaUrls."),  # noqa: E501
    }  # fmt: skip
    assert judge({"text": "a", "image_data": place(text)}) == sentence[what]
    allowed = Settings(limits=Limits(media_urls="Allowed"))
    assert judge({"text": "a", "image_data": place(text)}, given=allowed) == (None if what == "url" else sentence[what])


def test_code_from_requests_needs_engines_that_accept_it() -> None:
    assert judge({"text": "a", "custom_logit_processor": "8004"}, given=Settings(custom_logit_processors=True)) is None


@pytest.mark.parametrize(
    "pattern",
    ["(.*)*(.*)*!", "(a|a)*$", "(.|..)" * 40 + "!", "(?#[)(.*)*(.*)*!(?#])", "(a+)+b", "(a){2}", "(a)?b", "(?:a|b)", "(?i)a", "(?=a)b",
     "(?P<x>a)", r"(a)\1", r"\N{ASTERISK}", "[]a", "a[", "\\", r"(\()*", "([)])*", "(])*", "a\\", "(a)\u0662"[:3] + "*"],
)  # fmt: skip
def test_patterns_that_may_take_forever(pattern: str) -> None:
    assert count_repetitions(pattern) is None


@pytest.mark.parametrize(
    ("pattern", "number"),
    [("", 0), ("a", 0), (r"\*\+", 0), ("[*+?]", 0), ("a|b|c?", 1), (r"x{3}", 1), ("x{1,9}y{2}", 2), (r"\d+\.\d+", 2), (r"[\]*]+]*", 2),
     ("(.*)(.*)!", 2), ('"[^"]*"?', 2), ("a*?", 1), ("a++", 1), ("é+", 1), ("{a}b?", 1), ("[^]|(]", 0), ("()", 0), ("[^]]+?", 1), ("a{,}", 1)],  # noqa: E501
)  # fmt: skip
def test_repetitions_of_a_pattern(pattern: str, number: int) -> None:
    assert count_repetitions(pattern) == number


@given(st.text("ab([{\\|*+?^])}1,:", max_size=60))
def test_any_pattern_is_judged(pattern: str) -> None:
    found = count_repetitions(pattern)
    assert found is None or 0 <= found <= len(pattern)


def after(**fields: Any) -> Refusal | None:
    return check(AFTER_TOKENS, SimpleNamespace(**{"session_params": None, "has_embeddings": False} | fields), FACTS, Settings())


def test_tokens_of_a_text_are_checked() -> None:
    assert str(after(input_ids=[])) == "would_end_the_engine: The prompt has no token: give at least one."
    assert after(input_ids=[], session_params={"id": "s"}) is None
    assert after(input_ids=[], has_embeddings=True) is None
    assert after(input_ids=None) is None
    assert after(input_ids=[0, 2047]) is None
    assert str(after(input_ids=[5, 2048])) == "would_end_the_engine: The prompt has token 2048" + RANGE


FIELDS = [
    *("text", "input_ids", "input_embeds", "image_data", "video_data", "audio_data", "sampling_params", "return_logprob", "kv_hints"),
    *("logprob_start_len", "top_logprobs_num", "token_ids_logprob", "session_params", "lora_path", "lora_id", "custom_logit_processor"),
    *("return_hidden_states", "multi_item_delimiter_indices"),
]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3) | st.just(10**400)
KEYS = st.sampled_from([*SAMPLING_TYPES, "url", "id", "stop_strs"]) | st.text(max_size=3)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12)
PARAMS = st.dictionaries(st.sampled_from(sorted(SAMPLING_TYPES)), VALUES, max_size=4)


@settings(max_examples=400)
@given(
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6), PARAMS | st.lists(PARAMS, max_size=3), st.sampled_from([FACTS, REWARD])
)
def test_any_object_is_judged(body: dict[str, Any], params: Any, facts: Facts) -> None:
    for given_body in (body, body | {"sampling_params": params}, {"text": "a", "sampling_params": params}):
        found = check(RULES, SimpleNamespace(**given_body), replace(facts, adapters=frozenset("m")), SMALL)
        assert found is None or (found.code and len(found.sentence) < 400)


def seconds(body: dict[str, Any]) -> float:
    began = time.process_time()
    judge(body, replace(FACTS, context=2**30))
    return time.process_time() - began


@pytest.mark.parametrize(
    "make",
    [
        lambda n: {"input_ids": list(range(n % 2000)) + [5] * n},
        lambda n: {"input_ids": [[5]] * n},
        lambda n: {"text": "a" * n},
        lambda n: {"text": ["a"] * n},
        lambda n: sampled(stop_regex="[" + "a" * n),
        lambda n: sampled(stop_regex="{1" * n),
        lambda n: sampled(stop_regex="{" + "1" * n),
        lambda n: sampled(stop_regex=["[^]" * n]),
        lambda n: sampled(stop_regex=["a"] * n),
        lambda n: sampled(logit_bias=dict.fromkeys(map(str, range(n)), 1.0)),
        lambda n: sampled(stop=["a"] * n),
        lambda n: {"text": "a", "sampling_params": [{}] * n},
        lambda n: {"text": "a", "image_data": ["AAAA"] * n},
        lambda n: {"text": "a", "image_data": "x" * n},
        lambda n: {"text": "a", "token_ids_logprob": [[1]] * n},
        lambda n: {"text": "a", "lora_path": ["m"] * n},
    ],
)  # fmt: skip
def test_time_grows_with_the_request_only(make: Any) -> None:
    """A quadratic rule takes 400 times as long for 20 times the request. Only this process's own time counts, and the room is wide."""
    short = min(seconds(make(5_000)) for _ in range(3))
    long = min(seconds(make(100_000)) for _ in range(3))
    assert long < max(1.0, 120 * short)
