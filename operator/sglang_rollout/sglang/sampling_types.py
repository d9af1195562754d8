"""Types of SGLang's sampling parameters. Pure. The gate's filter and the batch server check them, because SGLang does not.

SGLang 0.5.23 copies ``sampling_params`` of ``/generate`` into its scheduler without a check of types, and some wrong types end it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BIAS, BOOLEAN, NUMBER, OBJECT, TEXT, TEXTS, TOKENS = "bias", "boolean", "number", "object", "text", "texts", "tokens"

SAMPLING_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "n", "beam_width", "stream_interval", "sampling_seed"), NUMBER),
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p"), NUMBER),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"), NUMBER),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"), BOOLEAN),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), TEXT),
    **dict.fromkeys(("stop", "stop_regex"), TEXTS),
    **dict.fromkeys(("custom_params", "watermark"), OBJECT),
    "stop_token_ids": TOKENS,
    "logit_bias": BIAS,
}
"""Type of each field of ``sampling_params`` that a client may set. Each may also be null."""

INTERNAL_SAMPLING_FIELDS = (
    *("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized", "ebnf_full_assistant"),
)
"""Fields of ``sampling_params`` that SGLang sets itself."""

WRONG_TYPE: Mapping[str, str] = {
    BIAS: "%s is no object of numbers.",
    BOOLEAN: "%s is neither true nor false.",
    NUMBER: "%s is no number.",
    OBJECT: "%s is no object.",
    TEXT: "%s is no string: write the grammar into one.",
    TEXTS: "%s is neither a string nor a list of strings.",
    TOKENS: "%s is no list of token ids.",
}
"""Sentence about a value of a wrong type, with a place for the name of the field."""
WRONG_SAMPLING_PARAMS = "sampling_params is neither an object nor a list of objects."

_CLASSES: Mapping[str, type | tuple[type, ...]] = {
    BIAS: dict,
    BOOLEAN: bool,
    NUMBER: (int, float),
    OBJECT: dict,
    TEXT: str,
    TEXTS: (str, list),
    TOKENS: list,
}


def find_wrong_type(params: Mapping[str, Any]) -> str | None:
    """Return a sentence about the first sampling parameter of a wrong type; None if there is none. Token IDs are not checked."""
    for key, kind in SAMPLING_TYPES.items():
        value = params.get(key)
        if value is not None and not (isinstance(value, _CLASSES[kind]) and _has_right_items(kind, value)):
            return WRONG_TYPE[kind] % key
    return None


def _has_right_items(kind: str, value: Any) -> bool:
    if kind == BIAS:
        return all(isinstance(item, int | float) for item in value.values())
    return not isinstance(value, list) or kind == TOKENS or all(isinstance(item, str) for item in value)
