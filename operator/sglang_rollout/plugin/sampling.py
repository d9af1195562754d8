"""Rules on sampling parameters and on the other fields of a request. Pure. Each function returns what fills the sentence, or None."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from .patterns import count_repetitions
from .request import Request, first_is_list, show

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
"""Type of each sampling parameter that a client may set. Each may also be None. SGLang copies them without a check on some paths."""
INTERNAL_PARAMS = ("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized", "ebnf_full_assistant")
"""Sampling parameters that SGLang sets itself."""
_WRONG = {
    BIAS: "is no object of numbers.",
    BOOLEAN: "is neither true nor false.",
    OBJECT: "is no object.",
    TEXT: "is no string: write the grammar into one.",
    TEXTS: "is neither a string nor a list of strings.",
    TOKENS: "is no list of token ids.",
}
WRONG_PARAMS = "sampling_params is neither an object nor a list of objects."
_INTERNAL = ("lora_id", "http_worker_ipc", "need_wait_for_mm_inputs", "num_items_assigned", "encoder_urls", "kv_hints")
_FATAL = ("positional_embed_overrides", "embed_overrides", "token_indices_to_pool", "multi_item_delimiter_indices", "custom_labels")
_SET_BY_SGLANG = {"/v1/score": ("token_indices_to_pool", "multi_item_delimiter_indices")}
"""Fields that SGLang sets itself on a path before the rules see them."""
_FOR_EACH_PROMPT = ("top_logprobs_num", "logprob_start_len", "return_hidden_states")
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
LARGEST_K = 2**31 - 1
"""SGLang samples in 32 bits."""
_LARGEST_FLOAT = 3.4028234663852886e38
_LARGEST_INTEGER = 2**63


def find_wrong_model(request: Request) -> tuple[()] | None:
    """Find a generation on a reward model."""
    return () if request.facts.generates and not request.facts.is_generation else None


def find_wrong_params(request: Request) -> tuple[()] | None:
    """Find sampling parameters that are no object and no list of objects."""
    found = request.get("sampling_params")
    if found is None or isinstance(found, dict):
        return None
    return None if isinstance(found, list) and set(map(type, found)) <= {dict} else ()


def find_internal_field(request: Request) -> tuple[str] | None:
    """Find a field that SGLang sets itself."""
    for name in _INTERNAL:
        if request.get(name) is not None:
            return (name,)
    return next(((name,) for name in INTERNAL_PARAMS for one in request.params if name in one), None)


def find_wrong_type(request: Request) -> tuple[str, str] | None:
    """Find a sampling parameter of a wrong type, except numbers."""
    for one in request.params:
        for key, kind in SAMPLING_TYPES.items():
            value = one.get(key)
            if value is not None and kind != NUMBER and not _is_kind(kind, value):
                return key, _WRONG[kind]
            if kind == NUMBER and isinstance(value, list | dict):
                return key, "is no number."
    found = request.get("token_ids_logprob")
    if found is not None and not _are_ids(found):
        return "token_ids_logprob", _WRONG[TOKENS]
    return None


def _are_ids(found: Any) -> bool:
    """Return true for token ids, or for a list of token ids of each prompt."""
    if not isinstance(found, list):
        return False
    if set(map(type, found)) <= {int}:
        return True
    return all(row is None or (isinstance(row, list) and set(map(type, row)) <= {int}) for row in found)


def _is_kind(kind: str, value: Any) -> bool:
    if kind == BIAS:
        return isinstance(value, dict) and all(map(_is_number, value.values()))
    if kind == TEXTS:
        return isinstance(value, str) or (isinstance(value, list) and set(map(type, value)) <= {str})
    if kind == TOKENS:
        return isinstance(value, list) and set(map(type, value)) <= {int}
    return isinstance(value, {BOOLEAN: bool, OBJECT: dict, TEXT: str}[kind])


def _is_number(value: Any) -> bool:
    """Return true for a finite number. SGLang reads true and false as numbers."""
    return (isinstance(value, int) and abs(value) < 2**1000) or (isinstance(value, float) and math.isfinite(value))


def _numbers(request: Request) -> Iterator[tuple[str, Any]]:
    for key, kind in SAMPLING_TYPES.items():
        if kind == NUMBER:
            yield from ((key, value) for value in request.values(key))
    for key in ("top_logprobs_num", "logprob_start_len"):
        yield from ((key, value) for value in _each(request, key))


def _each(request: Request, key: str) -> list[Any]:
    """Return the values of a field that may be one value or a value for each prompt."""
    value = request.get(key)
    return [one for one in value if one is not None] if isinstance(value, list) else [] if value is None else [value]


def find_no_number(request: Request) -> tuple[str, str] | None:
    """Find a number that is none."""
    return next(((key, show(value)) for key, value in _numbers(request) if not _is_number(value)), None)


def _samples(request: Request) -> Iterator[tuple[str, Any]]:
    for key in ("n", "beam_width"):
        yield from ((key, value) for value in request.values(key))


def find_many_samples(request: Request) -> tuple[str, float, int, str] | None:
    """Find more samples of one prompt than the limit."""
    most = request.limits.samples_per_prompt
    return next(((key, _float(value), most, "samplesPerPrompt") for key, value in _samples(request) if value > most), None)


def _float(number: float) -> float:
    return min(float(number), 1e308)


def find_many_samples_of_all(request: Request) -> tuple[int, int, str] | None:
    """Find more samples of all prompts than the limit."""
    number = max([1, *(math.ceil(value) for _, value in _samples(request))]) * request.prompts[1]
    most = request.limits.samples_per_request
    return (number, most, "samplesPerRequest") if number > most else None


def find_large_top_k(request: Request) -> tuple[int] | None:
    """Find a ``top_k`` of more than 32 bits."""
    return (LARGEST_K,) if any(abs(value) > LARGEST_K for value in request.values("top_k")) else None


def find_large_bias(request: Request) -> tuple[()] | None:
    """Find a bias that is infinite in 32 bits, which ends SGLang 0.5.20."""
    values = (value for one in request.values("logit_bias") for value in one.values())
    return () if any(abs(value) > _LARGEST_FLOAT for value in values) else None


def find_suppressed_token(request: Request) -> tuple[str, int] | None:
    """Find a stop token that the model does not have, if SGLang has to suppress it."""
    most = request.facts.vocabulary
    for one in request.params:
        if (one.get("min_new_tokens") or 0) > 0:
            for token in one.get("stop_token_ids") or ():
                if not 0 <= token < most:
                    return show(token), most - 1
    return None


def find_list_for_one_prompt(request: Request) -> tuple[str] | None:
    """Find a list of values in a request that SGLang reads as one prompt, where the list is taken for a value."""
    if request.prompts[2]:
        return None
    return next(((key,) for key in _FOR_EACH_PROMPT if isinstance(request.get(key), list)), None)


def find_early_start(request: Request) -> tuple[()] | None:
    """Find a start before the prompt."""
    return () if any(value < -1 for value in _each(request, "logprob_start_len")) else None


def find_impossible_logprobs(request: Request) -> tuple[int] | None:
    """Find more log-probabilities of a token than the model has tokens."""
    most = request.facts.vocabulary
    return (most,) if any(value > most for value in _each(request, "top_logprobs_num")) else None


def find_many_logprobs(request: Request) -> tuple[str, float, int, str] | None:
    """Find more log-probabilities of a token than the limit."""
    most = request.limits.logprobs_per_token
    key = "top_logprobs_num"
    return next(((key, _float(value), most, "logprobsPerToken") for value in _each(request, key) if value > most), None)


def find_many_logprob_tokens(request: Request) -> tuple[str, int, str, str] | None:
    """Find more tokens with log-probabilities than the limit."""
    found, most = request.get("token_ids_logprob") or [], request.limits.logprobs_per_token
    longest = len(found) if not first_is_list(found) and None not in found[:1] else max((len(row) for row in found if row), default=0)
    return ("token_ids_logprob", most, "tokens", "logprobsPerToken") if longest > most else None


def find_large_grammar(request: Request) -> tuple[str, int, str, str] | None:
    """Find grammars that are larger than the limit together."""
    most, found = request.limits.grammar_bytes, 0
    for key in _GRAMMARS:
        for value in request.values(key):
            found += count_bytes(value)
            if found > most:
                return f"The grammar up to {key}", most, "bytes", "grammarBytes"
    return None


def count_bytes(text: str) -> int:
    """Return the bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


def _repetitions(request: Request) -> Iterator[int | None]:
    for value in request.values("stop_regex"):
        yield from map(count_repetitions, [value] if isinstance(value, str) else value)


def find_endless_pattern(request: Request) -> tuple[()] | None:
    """Find a pattern whose match may take exponential time."""
    return () if any(number is None for number in _repetitions(request)) else None


def find_many_repetitions(request: Request) -> tuple[str, int, int, str] | None:
    """Find a pattern with more repetitions than the limit."""
    most = request.limits.stop_regex_repetitions
    found = next((number for number in _repetitions(request) if number is not None and number > most), None)
    return None if found is None else ("The number of repetitions in stop_regex", found, most, "stopRegexRepetitions")


def find_fatal_field(request: Request) -> tuple[str] | None:
    """Find a field whose use ends the engine."""
    allowed: tuple[str, ...] = _SET_BY_SGLANG.get(request.facts.path, ())
    if request.facts.path.startswith("/v1/"):
        allowed += ("custom_labels",)  # from a header that --tokenizer-metrics-custom-labels-header names
    return next(((name,) for name in _FATAL if name not in allowed and request.get(name) is not None), None)


def find_processor(request: Request) -> tuple[str] | None:
    """Find code in a request to engines that run none."""
    found = request.get("custom_logit_processor")
    return ("custom_logit_processor",) if found is not None and not request.settings.custom_logit_processors else None


def find_unknown_adapter(request: Request) -> tuple[str] | None:
    """Find an adapter that is not loaded. SGLang would load it again if it was unloaded."""
    found, adapters = request.get("lora_path"), request.facts.adapters
    if found is None or adapters is None:
        return None
    names = found if isinstance(found, list) else [found]
    return next(((show(name, 100),) for name in names if name and (not isinstance(name, str) or name not in adapters)), None)
