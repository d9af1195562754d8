"""Types of the fields of ``/generate``, which SGLang's decoder and its validation check before the plug-in sees a request. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_rollout.testing.replies import Invalid, Undecodable

_INTEGER, _FLOAT, _BOOLEAN, _STRING, _MAP, _SEQUENCE = "i64", "f64", "a boolean", "a string", "a map", "a sequence"
_STRINGS = "a value or an array of values for StringOrList"
_WATERMARK, _ANYTHING = "struct WatermarkRequestConfig", ""

SAMPLING_FIELDS: Mapping[str, str] = {
    "max_new_tokens": _INTEGER, "stop": _STRINGS, "stop_token_ids": _SEQUENCE, "stop_regex": _STRINGS, "temperature": _FLOAT,
    "top_p": _FLOAT, "top_k": _INTEGER, "min_p": _FLOAT, "frequency_penalty": _FLOAT, "presence_penalty": _FLOAT,
    "repetition_penalty": _FLOAT, "min_new_tokens": _INTEGER, "n": _INTEGER, "json_schema": _STRING, "regex": _STRING, "ebnf": _STRING,
    "structural_tag": _STRING, "ignore_eos": _BOOLEAN, "skip_special_tokens": _BOOLEAN, "spaces_between_special_tokens": _BOOLEAN,
    "no_stop_trim": _BOOLEAN, "stream_interval": _INTEGER, "logit_bias": _MAP, "sampling_seed": _INTEGER, "custom_params": _ANYTHING,
    "beam_width": _INTEGER, "watermark": _WATERMARK, "choice": _SEQUENCE,
}  # fmt: skip
"""Sampling parameters in SGLang's order, and what its decoder expects. Each may also be null."""
_DECODED_ONLY = "choice"
"""SGLang's decoder takes it, and its sampling does not."""
_NEW = "watermark"
"""SGLang 0.5.20 does not have it."""
_PYTHON: Mapping[str, tuple[type, ...]] = {
    _INTEGER: (int,), _FLOAT: (int, float), _BOOLEAN: (bool,), _STRING: (str,), _MAP: (dict,), _SEQUENCE: (list,),
    _STRINGS: (str, list), _WATERMARK: (dict,), _ANYTHING: (object,),
}  # fmt: skip
_INSIDE = {"stop_token_ids": _INTEGER, "stop": _STRING, "stop_regex": _STRING, "logit_bias": _FLOAT, "choice": _STRING}


def list_sampling_params(*, is_old: bool) -> list[str]:
    """Return the names that the plug-in finds in SGLang 0.5.23, or in 0.5.20 with ``is_old``."""
    return [name for name in SAMPLING_FIELDS if name != _DECODED_ONLY and not (is_old and name == _NEW)]


def check_types(body: Mapping[str, Any]) -> None:
    """Check the fields of ``/generate`` whose types matter to a stand-in or to the plug-in. Raises Invalid or Undecodable."""
    _check_prompts(body)
    params = body.get("sampling_params")
    each = params if isinstance(params, list) else [params]
    if not all(isinstance(one, dict) or (one is None and params is None) for one in each):
        raise Invalid("dict_type", ("body", "sampling_params"))
    for one in each:
        for name, value in (one or {}).items():
            if name not in SAMPLING_FIELDS:
                known = ", ".join(f"`{field}`" for field in SAMPLING_FIELDS)
                raise Undecodable(f"unknown field `{name}`, expected one of {known}")
            problem = find_wrong_type(name, value)
            if problem:
                raise Undecodable(problem)


def find_wrong_type(name: str, value: Any) -> str:
    """Return what the decoder says about the value of a sampling parameter; empty if the type is right."""
    if value is None:
        return ""
    if problem := _compare(value, SAMPLING_FIELDS[name]):
        return problem
    items = value.values() if isinstance(value, dict) else value
    if name not in _INSIDE or isinstance(value, str):
        return ""
    return next(filter(None, (_compare(item, _INSIDE[name]) for item in items)), "")


def _compare(value: Any, expected: str) -> str:
    types = _PYTHON[expected]
    fits = isinstance(value, types) and (not isinstance(value, bool) or bool in types or object in types)
    if fits and expected == _INTEGER:
        fits = -(2**63) <= value < 2**63
    return "" if fits else f"invalid type: {_name_type(value)}, expected {expected}"


def _name_type(value: Any) -> str:
    """Return how SGLang's decoder names a JSON value."""
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return f"integer `{value}`"
    if isinstance(value, int | float):
        return f"floating point `{float(value) if abs(value) < 1e308 else value}`"
    if isinstance(value, str):
        return f'string "{value}"'
    return "null" if value is None else "sequence" if isinstance(value, list) else "map"


def _check_prompts(body: Mapping[str, Any]) -> None:
    text, ids = body.get("text"), body.get("input_ids")
    if not isinstance(text, str | list | None) or (isinstance(text, list) and set(map(type, text)) - {str}):
        raise Invalid("string_type", ("body", "text"))
    if not isinstance(body.get("input_embeds"), list | None):
        raise Invalid("list_type", ("body", "input_embeds"))
    tokens = body.get("token_ids_logprob")
    if tokens is not None and (not isinstance(tokens, list) or set(map(type, tokens)) - {int, list, type(None)}):
        raise Invalid("list_type", ("body", "token_ids_logprob"))
    if ids is None:
        return
    rows = ids if isinstance(ids, list) and ids and isinstance(ids[0], list) else [ids]
    if not all(isinstance(row, list) for row in rows):
        raise Invalid("value_error", ("body", "input_ids"))
    kinds = {kind for row in rows for kind in set(map(type, row))}
    if bool in kinds:
        raise Undecodable("invalid type: boolean `true`, expected a sequence")
    if kinds - {int}:
        raise Invalid("value_error", ("body", "input_ids"))
