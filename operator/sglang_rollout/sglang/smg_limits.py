"""Parts of requests that SGLang accepts but smg drops or refuses. Pure. Found with smg 1.13.0 and SGLang 0.5.23.

smg reads a request into its own types and writes it out again. It silently drops the sampling parameters and image fields that it does not
know, and its numeric limits are OpenAI's, narrower than SGLang's. Two parts of the router need to know:

- the front (haproxy) picks candidates with :data:`GENERATE_PATTERN` and :data:`OPENAI_PATTERN` and sends them to the batch server;
- the batch server decides exactly with :func:`should_bypass_smg` and sends the other requests to smg.

The patterns and the function are built from the tables below. A pattern may match too much, never too little.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglang_rollout.sglang.api import CHAT_COMPLETIONS, GENERATE

FORWARDED_SAMPLING_PARAMETERS = frozenset(
    {"max_new_tokens", "min_new_tokens", "stop", "stop_token_ids", "n", "ignore_eos", "no_stop_trim", "skip_special_tokens"}
    | {"temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"}
    | {"json_schema", "regex", "ebnf", "sampling_seed", "custom_params"}
)
"""Keys of ``sampling_params`` that smg forwards."""
DROPPED_SAMPLING_PARAMETERS = (
    *("beam_width", "choice", "logit_bias", "spaces_between_special_tokens"),
    *("stop_regex", "stream_interval", "structural_tag", "watermark"),
)
"""Keys of ``sampling_params`` that SGLang knows and smg drops."""
CARRIED_SAMPLING_PARAMETERS = FORWARDED_SAMPLING_PARAMETERS.union(DROPPED_SAMPLING_PARAMETERS)
"""Keys of ``sampling_params`` that reach an engine, through smg or past it. Any other key may be dropped on the way."""
MEANINGFUL_NULLS = ("max_new_tokens",)
"""Keys of ``sampling_params`` whose null SGLang tells from a missing key (no limit, in place of 128 tokens). smg drops all nulls."""
IGNORED_FIELDS = ("model",)
"""Keys of a body of ``/generate`` that SGLang ignores. smg refuses null there, and looks for an engine with that model."""
CHAT_MAXIMA = {"n": 10, "top_logprobs": 20, "temperature": 2}
COMPLETIONS_MAXIMA = {"n": 128, "logprobs": 20, "temperature": 2}
"""The largest values that smg accepts."""
MAX_STOP_STRINGS = 4
FORWARDED_PART_FIELDS = frozenset({"type", "image_url"})
FORWARDED_IMAGE_FIELDS = frozenset({"url", "detail", "max_long_side_pixel"})
"""Fields of an image in a chat message that smg forwards."""
DROPPED_IMAGE_FIELDS = ("content_hash", "max_dynamic_patch", "min_dynamic_patch", "modalities")
"""Fields of an image, or of the part that holds it, that SGLang knows and smg drops."""


def should_bypass_smg(path: str, body: Any) -> bool:
    """Return True if smg would refuse this body or change its meaning, and an engine would not."""
    if not isinstance(body, Mapping):
        return False
    if path == GENERATE:
        params = body.get("sampling_params")
        if not isinstance(params, Mapping):
            return False
        return not params.keys() <= FORWARDED_SAMPLING_PARAMETERS or any(key in params and params[key] is None for key in MEANINGFUL_NULLS)
    maxima = CHAT_MAXIMA if path == CHAT_COMPLETIONS else COMPLETIONS_MAXIMA
    if any(_as_number(body.get(key)) > maximum for key, maximum in maxima.items()):
        return True
    if path == CHAT_COMPLETIONS and any(_loses_image_fields(part) for part in _message_parts(body.get("messages"))):
        return True
    stop, top_k = body.get("stop"), body.get("top_k")
    return (isinstance(stop, list) and len(stop) > MAX_STOP_STRINGS) or (top_k == 0 and not isinstance(top_k, bool))


def _message_parts(messages: Any) -> Iterator[Any]:
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, Mapping) else None
        yield from content if isinstance(content, list) else []


def _loses_image_fields(part: Any) -> bool:
    image = part.get("image_url") if isinstance(part, Mapping) else None
    return isinstance(image, Mapping) and not (part.keys() <= FORWARDED_PART_FIELDS and image.keys() <= FORWARDED_IMAGE_FIELDS)


def _as_number(value: Any) -> float:
    # Not float(): it raises for an integer with hundreds of digits.
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


_B = "[[:space:]]*"
"""Blanks in a POSIX regular expression. Each pattern below starts right after the opening quote of a key."""


def _keys(names: tuple[str, ...]) -> str:
    return f'({"|".join(names)})"{_B}:'


def _maxima_patterns() -> Iterator[str]:
    """Yield one pattern for each numeric key. It matches all numbers above the key's lowest maximum, and some below."""
    lowest = dict(CHAT_MAXIMA)
    for key, maximum in COMPLETIONS_MAXIMA.items():
        lowest[key] = min(maximum, lowest.get(key, maximum))
    two_digits = tuple(sorted(key for key, maximum in lowest.items() if maximum >= 10))
    yield f"{_keys(two_digits)}{_B}[1-9][0-9]"
    for key, maximum in lowest.items():
        if maximum < 10:
            yield f'{key}"{_B}:{_B}([{maximum}-9]|[1-9][0-9])'


GENERATE_PATTERN = "|".join(
    (
        _keys((*DROPPED_SAMPLING_PARAMETERS, *IGNORED_FIELDS)),
        *(f'{key}"{_B}:{_B}null' for key in MEANINGFUL_NULLS),
    )
)
"""Regular expression (POSIX) of keys in bodies of ``/generate`` that may have to bypass smg, or that smg must not get."""
OPENAI_PATTERN = "|".join(
    (
        *_maxima_patterns(),
        rf'top_k"{_B}:{_B}0',
        rf'stop"{_B}:{_B}\[([^],]*,){{{MAX_STOP_STRINGS}}}',
        rf'model"{_B}:{_B}"[^"]*:',
        _keys(DROPPED_IMAGE_FIELDS),
    )
)
"""The same for bodies of OpenAI's API. ``model: "name:adapter"`` matches too, because smg knows no adapters and the batch server does."""
