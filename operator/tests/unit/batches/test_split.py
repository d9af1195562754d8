"""Split batches and joined answers, by SGLang's rules."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.api.limits_spec import Limits
from sglang_rollout.batches.split import BatchError, add_index, encode, join, parse, split

LIMITS = Limits(prompts_per_request=40, samples_per_request=1024)


def items(**body: Any) -> list[dict[str, Any]]:
    batch = split(body, LIMITS)
    assert batch is not None
    return [batch.item(index) for index in range(batch.size)]


KEYS = st.text(max_size=3)
LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
JSON = LEAVES | st.lists(LEAVES, max_size=3) | st.dictionaries(KEYS, LEAVES, max_size=3)
IDS = st.lists(st.integers(0, 9), min_size=1, max_size=4)
LISTED = {
    "sampling_params": st.fixed_dictionaries({"temperature": st.integers(0, 2)}, optional={"max_new_tokens": st.integers(1, 9)}),
    "return_logprob": st.booleans(),
    "logprob_start_len": st.integers(-1, 5),
    "top_logprobs_num": st.integers(0, 3),
    "lora_path": st.text(min_size=1, max_size=3),
    "image_data": st.text(min_size=1, max_size=4) | st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=2),
    "video_data": st.text(min_size=1, max_size=4),
    "token_ids_logprob": IDS,
    "extra_key": st.text(min_size=1, max_size=3),
    "custom_logit_processor": st.text(min_size=1, max_size=3),
    "mm_hashes": st.lists(st.text(max_size=2), min_size=1, max_size=2),
}
"""Fields that may differ between the prompts of a batch, and the values of one prompt."""
COMMON = {
    "stream": st.booleans(),
    "session_params": st.dictionaries(KEYS, st.integers(), max_size=2),
    "a_new_field": JSON,
    "priority": st.integers(),
}


@st.composite
def singles(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Generate requests with one prompt each that can be one batch."""
    size = draw(st.integers(1, 6))
    prompt = draw(st.sampled_from(["text", "input_ids", "input_embeds"]))
    kinds = {
        "text": st.text(max_size=5),
        "input_ids": IDS,
        "input_embeds": st.lists(st.lists(st.just(0.5), min_size=1, max_size=2), min_size=1, max_size=2),
    }
    listed = draw(st.sets(st.sampled_from(sorted(LISTED))))
    common = draw(st.fixed_dictionaries({}, optional=COMMON))
    rids = draw(st.none() | st.lists(st.text(min_size=1, max_size=4), min_size=size, max_size=size, unique=True))
    made = []
    for i in range(size):
        single = {prompt: draw(kinds[prompt])} | {key: draw(LISTED[key]) for key in sorted(listed)} | common
        made.append(single | ({"rid": rids[i]} if rids else {}))
    return made


def batched(requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the batch of these requests: a list for each field that differs."""
    return {key: first if key in COMMON else [request[key] for request in requests] for key, first in requests[0].items()}


@given(singles())
def test_a_batch_is_split_into_its_requests(requests: list[dict[str, Any]]) -> None:
    batch = split(batched(requests), LIMITS)
    assert batch is not None
    assert [{key: value for key, value in item.items() if value is not None} for item in map(batch.item, range(batch.size))] == [
        {key: value for key, value in request.items() if value is not None} for request in requests
    ]
    assert batch.stream == bool(requests[0].get("stream"))


@given(st.lists(st.lists(st.dictionaries(KEYS, JSON, max_size=3), min_size=1, max_size=3), max_size=5), st.integers(0, 2))
def test_joined_answers_are_one_list_in_order(answers: list[list[dict[str, Any]]], indent: int) -> None:
    """An answer with one sample is an object, one with several is a list."""
    raw = [json.dumps(answer[0] if len(answer) == 1 else answer, indent=indent or None).encode() for answer in answers]
    assert json.loads(b"".join(join(raw))) == [sample for answer in answers for sample in answer]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"text": "one"},
        {"input_ids": [1, 2]},
        {"input_ids": []},
        {"input_embeds": [[0.1, 0.2]]},
        {"input_embeds": [[]]},
        {"text": "one", "input_ids": [[1], [2]]},
        {"input_ids": "what"},
        {"text": "one", "sampling_params": {"n": 4}},
    ],
)
def test_a_body_with_one_prompt_is_not_a_batch(body: dict[str, Any]) -> None:
    assert split(body, LIMITS) is None


def test_an_invalid_number_of_samples_is_left_to_sglang() -> None:
    assert [item["sampling_params"] for item in items(text=["a", "b"], sampling_params={"n": -2})] == [{"n": -2}] * 2


def test_a_single_value_applies_to_all_prompts_and_null_is_omitted() -> None:
    first, second = items(text=["a", "b"], rid="r", sampling_params={"n": 2}, lora_path=["x", None], return_logprob=True, image_data="i")
    same = {"sampling_params": {"n": 2}, "return_logprob": True, "image_data": "i"}
    assert first == {"text": "a", "rid": "r_0", "lora_path": "x", **same}
    assert second == {"text": "b", "rid": "r_1", **same}


def test_token_ids_for_all_and_for_each() -> None:
    assert [item["token_ids_logprob"] for item in items(text=["a", "b"], token_ids_logprob=[7, 8])] == [[7, 8], [7, 8]]
    assert [item["token_ids_logprob"] for item in items(text=["a", "b"], token_ids_logprob=[[7], [8]])] == [[7], [8]]
    assert "token_ids_logprob" not in items(text=["a"], token_ids_logprob=[])[0]


def test_bootstrap_rooms_are_numbered() -> None:
    assert [item["bootstrap_room"] for item in items(text=["a", "b"], bootstrap_room=5)] == [5, 6]
    assert [item["bootstrap_room"] for item in items(text=["a", "b"], bootstrap_room=[5, 9])] == [5, 9]


def test_the_requests_of_a_batch_outlive_its_fields() -> None:
    batch = split({"text": ["a", "b"], "image_data": "i"}, Limits())
    assert batch is not None
    made = [batch.item(0), batch.item(1)]
    batch.drop_fields()
    assert (batch.common, batch.columns) == ({}, {})
    assert made == [{"text": "a", "image_data": "i"}, {"text": "b", "image_data": "i"}]


def test_an_empty_batch_has_no_items() -> None:
    assert items(text=[]) == []
    assert b"".join(join([])) == b"[]"


@given(st.dictionaries(KEYS, st.text(st.sampled_from("aé\U0001f600\ud83d"), max_size=3)))
def test_a_request_with_lone_surrogates_is_encoded_unchanged(fields: dict[str, str]) -> None:
    assert json.loads(encode(fields)) == fields


def test_valid_text_is_not_escaped() -> None:
    assert encode({"text": "é\U0001f600"}) == '{"text":"é\U0001f600"}'.encode()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"rid": ["a"]}, "The specified rids length mismatch with the batch_size for batch processing."),
        ({"rid": ["a", "a"]}, "Duplicate request IDs detected within the request: ['a']"),
        ({"rid": 7}, "The rid should be a string or a list of strings."),
        ({"image_data": ["x"]}, "The length of image_data should be equal to the batch size."),
        ({"extra_key": ["x"]}, "The length of extra_key should be equal to the batch size."),
        ({"mm_hashes": ["x"]}, "The length of mm_hashes should equal the batch size"),
        ({"sampling_params": [{"n": 1}, {"n": 2}]}, "The parallel_sample_num should be the same for all samples in sample params."),
        ({"sampling_params": {"n": 2}, "return_logprob": [True, False]}, "Cannot use list return_logprob with parallel_sample_num > 1"),
        ({"sampling_params": {"n": 2}, "token_ids_logprob": [[1], [2]]}, "Cannot use list token_ids_logprob with parallel_sample_num > 1"),
        ({"sampling_params": [{}]}, "sampling_params has 1 entries for 2 prompts."),
        ({"lora_path": ["x"]}, "lora_path has 1 entries for 2 prompts."),
    ],
)
def test_an_invalid_batch_gets_sglangs_message(more: dict[str, Any], words: str) -> None:
    with pytest.raises(BatchError) as error:
        split({"text": ["a", "b"], **more}, LIMITS)
    assert (str(error.value), error.value.code) == (words, None)


SAMPLES = "The number of samples of all prompts is "


@pytest.mark.parametrize(
    ("body", "words", "field"),
    [
        ({"text": ["a"] * 41}, "The number of prompts in text is 41, above the limit of 40", "promptsPerRequest"),
        ({"input_ids": [[1]] * 41}, "The number of prompts in input_ids is 41, above the limit of 40", "promptsPerRequest"),
        ({"input_embeds": [[[0.5]]] * 41}, "The number of prompts in input_embeds is 41, above the limit of 40", "promptsPerRequest"),
        ({"text": ["a"] * 40, "sampling_params": {"n": 26}}, SAMPLES + "1040, above the limit of 1024", "samplesPerRequest"),
        ({"text": ["a"] * 2, "sampling_params": [{}, {"beam_width": 513}]}, SAMPLES + "1026, above the limit of 1024", "samplesPerRequest"),
        ({"text": ["a"], "sampling_params": {"best_of": 1025.0}}, SAMPLES + "1025, above the limit of 1024", "samplesPerRequest"),
        ({"text": ["a"], "sampling_params": {"n": 1e308}}, SAMPLES + "1e+18, above the limit of 1024", "samplesPerRequest"),
        ({"text": ["a"], "sampling_params": {"n": 10**400}}, SAMPLES + "1e+18, above the limit of 1024", "samplesPerRequest"),
    ],
)
def test_a_batch_above_a_limit_is_refused_with_the_field_that_raises_it(body: dict[str, Any], words: str, field: str) -> None:
    with pytest.raises(BatchError) as error:
        split(body, LIMITS)
    assert (str(error.value), error.value.code) == (f"{words}; engine.limits.{field} raises it.", "above_limit")


def test_a_batch_within_the_limits_is_split() -> None:
    assert len(items(text=["a"] * 40, sampling_params=[{"n": 25, "best_of": None, "custom_params": {"n": 99}}] * 40)) == 40


BODY = '{"text": ["a"]}'


@pytest.mark.parametrize(
    "data",
    [
        *(BODY.encode(name) for name in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be", "utf-8-sig")),
        *(b"", b"[]", b"null", b'"a"', b"5", b"no json", b"{'text': 1}", b'{"text": }', b'{"text": "\xff"}', b'{"a":' * 10**5),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(BatchError, match=r"^The body (is not a JSON object in UTF-8|nests too deep)") as error:
        parse(data)
    assert error.value.code == "unreadable_body"


@pytest.mark.parametrize("data", ["{}", BODY, " \n{ " + BODY[1:], '{"\\u0074ext": ["a"]}', '{"text": ["é"]}'])
def test_a_json_object_is_parsed(data: str) -> None:
    assert parse(data.encode()) == json.loads(data)


def test_events_get_sglangs_index() -> None:
    assert json.loads(add_index(b'{"text":"x"}', 3, 1)) == {"text": "x", "index": 3}
    assert json.loads(add_index(b'{"index":1,"text":"\xc3\xa9"}', 3, 2)) == {"text": "é", "index": 7}


@pytest.mark.parametrize(
    "more",
    [
        {"sampling_params": {"stop_token_ids": {"99999": 1}}},
        {"sampling_params": [{}, {"logit_bias": {"5": "x"}}]},
        {"sampling_params": {"n": "2"}},
        {"sampling_params": [{}, None]},
        {"input_ids": [["5"], [1e9]]},
        {"token_ids_logprob": [[5], ["5"]]},
    ],
)
def test_values_of_one_prompt_are_sent_as_they_came_because_the_engine_checks_them(more: dict[str, Any]) -> None:
    first, second = items(**{"text": ["a", "b"], **more})
    for key, value in more.items():
        given = value if isinstance(value, list) else [value, value]
        assert [first.get(key), second.get(key)] == given
