"""The dialects of trainers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.coordinator.http import dialects
from sglang_rollout.coordinator.update.requests import (
    Answer,
    Begin,
    CloseGroup,
    Continue,
    End,
    Flush,
    LoadAdapter,
    Pause,
    Request,
    SetLabel,
    Update,
)
from sglang_rollout.wire.reasons import RefusedError, reason_phrase

TENSORS: dict[str, Any] = {"names": ["a", "b"], "dtypes": ["bfloat16", "torch.float32"], "shapes": [[1], [2, 3]]}


def test_the_label_and_the_announced_names_of_a_begin_go_to_no_engine() -> None:
    body = {"weight_version": 7, "names": ["a", "b"], "selector": "target"}
    assert dialects.begin(body) == Begin({"selector": "target"}, "7", frozenset("ab"))
    assert dialects.begin({}) == Begin()
    for wrong in ("a", [""], [5], {"a": 1}):
        with pytest.raises(RefusedError, match="names"):
            dialects.begin({"names": wrong})


@pytest.mark.parametrize("data", [b"", b"  \n", b"null", b"{}"])
def test_an_empty_body_is_an_empty_object(data: bytes) -> None:
    assert dialects.parse(data) == {}


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b'{"a": ', "the body is not JSON: line 1, column 7: Expecting value."),
        (b'{"a":1}\n{"b"', "line 2, column 1: Extra data."),
        (b"\xff\xfe{", "not UTF-8"),
        (b"[1]", "the body must be a JSON object, not list."),
        (b'"x"', "not str."),
        (b"[" * 100_000, "nests too deep"),
        (b'{"a": 1, "names": ["w", "\\ud83d"]}', "names holds half of a character"),
        (b'{"selector": {"x": [{"\\ude00": 1}]}}', "selector holds half of a character"),
        (b'{"\\udce9": 1}', "\\udce9 holds half of a character"),
        (b'{"path": "\xed\xa0\xbd"}', "path holds half of a character"),
    ],
)
def test_an_invalid_body_is_refused_with_the_position(data: bytes, sentence: str) -> None:
    with pytest.raises(RefusedError) as caught:
        dialects.parse(data)
    assert sentence in str(caught.value)


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    with contextlib.suppress(RefusedError):
        assert isinstance(dialects.parse(data), dict)


TEXT = st.text(st.sampled_from('a2"é\U0001f600\ud83d\ude00'), max_size=4) | st.sampled_from(["abort", "2", "weights", "0" * 5000])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(TEXT, JSON, max_size=4), st.booleans())
def test_an_accepted_body_can_be_encoded(body: dict[str, Any], escaped: bool) -> None:
    try:
        taken = dialects.parse(json.dumps(body, ensure_ascii=escaped).encode("utf-8", "surrogatepass"))
    except RefusedError:
        return
    assert json.dumps(taken, ensure_ascii=False).encode()


def test_a_surrogate_pair_is_accepted() -> None:
    assert dialects.parse(b'{"lora_name": "\\ud83d\\ude00"}') == {"lora_name": "\U0001f600"}


PARSERS: list[Callable[[dict[str, Any]], Request]] = [
    dialects.close_group, dialects.pause, dialects.update, dialects.end,
    dialects.from_disk, dialects.tensors, dialects.set_label, dialects.release_memory, dialects.resume_memory,
    dialects.load_adapter, dialects.unload_adapter,
]  # fmt: skip
FIELDS = [
    "group_name", "mode", "checksums", "name", "dtype", "shape", "names", "dtypes", "shapes", "weight_version", "new_version",
    "model_path", "load_format", "serialized_named_tensors", "tags", "lora_name", "lora_path", "pinned",
]  # fmt: skip


@pytest.mark.parametrize("parse", PARSERS, ids=lambda parse: parse.__name__)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6))
def test_a_field_of_any_type_is_accepted_or_refused(parse: Callable[[dict[str, Any]], Request], body: dict[str, Any]) -> None:
    try:
        request = parse(body)
    except RefusedError:
        return
    assert request is not None


def update(body: dict[str, Any]) -> Update:
    request = dialects.update(body)
    assert isinstance(request, Update)
    return request


def test_the_singular_form_becomes_lists_and_needs_no_group() -> None:
    request = update({"name": "w", "dtype": "torch.bfloat16", "shape": [2, 3]})
    assert request.group is None
    assert request.body == {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[2, 3]]}


def test_a_version_may_be_a_number_and_unknown_fields_are_forwarded() -> None:
    request = update({**TENSORS, "weight_version": 7, "group_name": "g", "load_format": "flattened_bucket", "x": [1]})
    assert (request.label, request.group) == ("7", "g")
    assert request.body["weight_version"] == "7"
    assert request.body["x"] == [1]
    assert request.body["dtypes"] == ["bfloat16", "float32"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"shapes": [[1]]}, "the tensor lists differ in length: 2 names, 2 dtypes, 1 shapes."),
        ({"names": []}, "names is missing"),
        ({"names": "a"}, "names is missing"),
        ({"weight_version": 1.5}, "weight_version 1.5 is not a version"),
        ({"weight_version": "x" * 300}, "300 characters long"),
        ({"group_name": 5}, "group_name 5 is not a name."),
    ],
)
def test_an_update_that_would_hang_or_mislead_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RefusedError) as caught:
        update({**TENSORS, **changes})
    assert sentence in str(caught.value)


def test_a_pause_without_mode_has_sglangs_default() -> None:
    assert dialects.pause({}) == Pause("abort", {"mode": "abort"})
    assert dialects.pause({"mode": "in_place"}) == Pause("in_place", {"mode": "in_place"})
    unknown: list[Any] = ["nap", ["abort"], {}, 1]
    for mode in unknown:
        with pytest.raises(RefusedError, match="use retract, abort, in_place"):
            dialects.pause({"mode": mode})


def test_checksums_of_a_trainer_are_read() -> None:
    assert dialects.end({"checksums": {"2": ["a", "b"], "1": ["c"]}}) == End({2: ("a", "b"), 1: ("c",)})
    assert dialects.end({}) == dialects.end({"checksums": None, "other": 1}) == End()


@pytest.mark.parametrize("checksums", [["a"], {"one": ["a"]}, {"1": "a"}, {"1": [2]}, {"2": ["a"]}, {"9" * 5000: ["a"]}, {"0" * 5000: []}])
def test_malformed_checksums_are_refused(checksums: object) -> None:
    with pytest.raises(RefusedError, match="checksums"):
        dialects.end({"checksums": checksums})


def test_simple_calls_become_requests() -> None:
    assert dialects.close_group({}) == CloseGroup(None)
    assert dialects.set_label({"new_version": 4, "abort_all_requests": True}) == SetLabel("4")
    assert dialects.flush({"timeout": "3"}) == Flush(3.0)
    with pytest.raises(RefusedError):
        dialects.set_label({})
    with pytest.raises(RefusedError):
        dialects.flush({"timeout": "nan"})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lora_name": None}, "lora_name and lora_path are missing"),
        ({"lora_path": ""}, "lora_name and lora_path are missing"),
        ({"lora_name": "a" * 257}, "lora_name is 257 characters long: use at most 256."),
        ({"lora_path": "/" * 4097}, "lora_path is 4097 characters long: use at most 4096."),
        ({"pinned": "yes"}, "pinned 'yes' is neither true nor false."),
        ({"added_tokens_config": {}}, "/load_lora_adapter has no field 'added_tokens_config': SGLang ignores it."),
    ],
)
def test_an_invalid_adapter_is_refused(changes: dict[str, Any], sentence: str) -> None:
    longest = {"lora_name": "a" * 256, "lora_path": "/" * 4096}
    assert dialects.load_adapter(longest) == LoadAdapter(longest["lora_name"], longest["lora_path"])
    assert dialects.load_adapter({**longest, "pinned": True}) == LoadAdapter(longest["lora_name"], longest["lora_path"], pinned=True)
    with pytest.raises(RefusedError) as caught:
        dialects.load_adapter({**longest, **changes})
    assert sentence in str(caught.value)


def test_a_field_that_sglang_does_not_know_is_refused_when_an_adapter_is_unloaded() -> None:
    with pytest.raises(RefusedError, match=r"/unload_lora_adapter has no field 'force': SGLang ignores it\. Use lora_name\."):
        dialects.unload_adapter({"lora_name": "a", "force": True})


def test_answers_have_the_shape_that_clients_read() -> None:
    paused = dialects.format_answer(Continue(), Answer(200, "Generation continued successfully."))
    assert paused == {"success": True, "message": "Generation continued successfully.", "status": "ok"}
    assert dialects.format_answer(SetLabel("7"), Answer(200, "ok"))["new_version"] == "7"
    json.dumps(dialects.format_answer(Continue(), Answer(400, "no", {"epoch": 3})))


@given(st.text(max_size=600))
def test_a_reason_phrase_is_one_short_printable_line(message: str) -> None:
    phrase = reason_phrase(message)
    assert len(phrase) <= 200
    assert phrase.encode("latin-1").decode("latin-1").isprintable() or not phrase
    assert "\n" not in phrase


@pytest.mark.parametrize("label", ["7\n2026-11-23 INFO forged", "a\r", "a\x1b[2K", "a\x85", "a\u2028", "\x7f"])
def test_labels_with_control_characters_are_refused(label: str) -> None:
    for parser, body in (
        (dialects.set_label, {"new_version": label}),
        (dialects.from_disk, {"model_path": "/ckpt", "weight_version": label}),
    ):
        with pytest.raises(RefusedError, match="control character"):
            parser(body)
    assert dialects.set_label({"new_version": "Schritt é 政策 🚀"}) == SetLabel("Schritt é 政策 🚀")
