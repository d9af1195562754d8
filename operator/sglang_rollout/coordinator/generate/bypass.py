"""Requests that SGLang takes and smg does not pass on as they are: an engine is asked for these directly. Pure.

smg reads a request into types of its own and writes it out again. Of ``sampling_params`` and of images it drops what it does not know,
without a word, and the ranges of OpenAI's API are narrower than SGLang's. Found with smg 1.13.0; the front looks for the same
(``proxy/config.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_SAMPLING = frozenset(
    {"max_new_tokens", "min_new_tokens", "stop", "stop_token_ids", "n", "ignore_eos", "no_stop_trim", "skip_special_tokens"}
    | {"temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"}
    | {"json_schema", "regex", "ebnf", "sampling_seed", "custom_params"}
)
"""What smg passes on of ``sampling_params``."""
_CHAT = {"n": 10, "top_logprobs": 20, "temperature": 2}
_COMPLETIONS = {"n": 128, "logprobs": 20, "temperature": 2}
"""The largest numbers that smg takes."""
_STOPS = 4
_IMAGE_PART = frozenset({"type", "image_url"})
_IMAGE = frozenset({"url", "detail", "max_long_side_pixel"})
"""What smg passes on of an image in chat."""


def beyond_smg(path: str, body: Any) -> bool:
    """Whether the answer would be another one than an engine's, or a refusal of what an engine takes."""
    if not isinstance(body, Mapping):
        return False
    if path == "/generate":
        params = body.get("sampling_params")
        return isinstance(params, Mapping) and not params.keys() <= _SAMPLING
    largest = _CHAT if path == "/v1/chat/completions" else _COMPLETIONS
    if any(_number(body.get(key)) > most for key, most in largest.items()):
        return True
    if path == "/v1/chat/completions" and any(_tells_more(part) for part in _parts(body.get("messages"))):
        return True
    stop, top_k = body.get("stop"), body.get("top_k")
    return (isinstance(stop, list) and len(stop) > _STOPS) or (top_k == 0 and not isinstance(top_k, bool))


def _parts(messages: Any) -> Iterator[Any]:
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, Mapping) else None
        yield from content if isinstance(content, list) else []


def _tells_more(part: Any) -> bool:
    """Whether it is an image of which more is said than smg passes on."""
    image = part.get("image_url") if isinstance(part, Mapping) else None
    return isinstance(image, Mapping) and not (part.keys() <= _IMAGE_PART and image.keys() <= _IMAGE)


def _number(value: Any) -> float:
    # Not float(): it takes no whole number of hundreds of digits.
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
