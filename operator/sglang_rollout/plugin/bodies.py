"""Rules on the JSON of a request as SGLang has parsed it, before SGLang validates, converts or tokenises it.

SGLang does these before the rules on requests run, and answers no other request meanwhile: it writes a message about each value of a
wrong type, and it converts tools and tokenises texts of any size. So these rules bound the number of values, the texts and the depth.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

from .process import Hook, settings
from .refusal import ABOVE_LIMIT, CHECK_FAILED, UNREADABLE, Refusal
from .request import show
from .settings import Limits
from .tokens import CHARACTERS_PER_TOKEN

log = logging.getLogger(__name__)

PATHS = frozenset(
    (
        *("/generate", "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/classify", "/classify", "/encode", "/v1/score"),
        *("/v1/rerank", "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/v1/messages", "/v1/messages/count_tokens"),
        *("/v1/responses", "/api/chat", "/api/generate", "/invocations", "/vertex_generate"),
    )
)
"""Paths of requests for tokens, embeddings and scores. Control calls name every tensor of a model."""
DEEPEST = 200
"""Most levels of lists and objects. SGLang fails at 900."""
_NUMBERS = frozenset(
    ("input_ids", "input_embeds", "prompt", "tokens", "input", "query", "items", "stop_token_ids", "token_ids_logprob", "label_token_ids")
)
"""Fields whose lists of numbers are no values: token ids and embeddings."""
_TEXTS = frozenset(("messages", "system", "instructions", "prompt", "input", "content", "query", "documents", "items"))
"""Fields whose texts SGLang tokenises."""
_NO_TEXT = frozenset(("url", "image_url", "video_url", "audio_url", "input_audio", "data", "image", "source", "type", "role", "id"))
"""Fields inside of these that hold images, audio, video and names."""
_GRAMMARS = frozenset(("tools", "functions", "response_format"))
_TOKENISED_TOGETHER = frozenset(("messages",))
_NUMBER_TYPES = frozenset((int, float))


def find_problem(path: str, body: Any, limits: Limits, context: int) -> Refusal | None:
    """Return why a body is refused; None if it passes. Takes time in proportion to the body.

    Args:
        path: Path of the request.
        body: The parsed JSON.
        limits: The limits of the spec.
        context: Tokens of the model's context.
    """
    if not isinstance(body, dict):
        return None  # SGLang itself refuses it
    values = 0
    for field, value in body.items():
        found = _count(value, counts_numbers=field not in _NUMBERS, most=limits.values_per_request - values)
        if found is None:
            return Refusal(UNREADABLE, f"{show(field)} has more than {DEEPEST} levels of lists and objects.")
        values += found + 1
        if values > limits.values_per_request:
            most = limits.values_per_request
            sentence = f"The request has more than {most} values up to {show(field)}; engine.limits.valuesPerRequest raises it."
            return Refusal(ABOVE_LIMIT, sentence)
    grammar = sum(len(text) for field in _GRAMMARS for text in _texts(body.get(field), frozenset()))
    if grammar > limits.grammar_bytes:
        sentence = f"tools and response_format have more than {limits.grammar_bytes} bytes; engine.limits.grammarBytes raises it."
        return Refusal(ABOVE_LIMIT, sentence)
    return _find_long_text(path, body, CHARACTERS_PER_TOKEN * context)


def _find_long_text(path: str, body: dict[str, Any], most: int) -> Refusal | None:
    for field in _TEXTS & body.keys():
        lengths = [len(text) for text in _texts(body[field], _NO_TEXT)]
        together = field in _TOKENISED_TOGETHER or path.endswith("tokenize")
        longest = sum(lengths) if together else max(lengths, default=0)
        if longest > most:
            reason = f"{CHARACTERS_PER_TOKEN} for each token of the model's context."
            return Refusal(ABOVE_LIMIT, f"{field} has {longest} characters, which is more than {most}: {reason}")
    return None


def _count(value: Any, *, counts_numbers: bool, most: int) -> int | None:
    """Return the keys and items inside of a value, at least until ``most`` is exceeded; None if it is too deep."""
    found, level, rest = 0, 0, [value]
    while rest:
        level += 1
        if level > DEEPEST:
            return None
        below: list[Any] = []
        for each in rest:
            if not isinstance(each, dict | list):
                continue
            inner = each.values() if isinstance(each, dict) else each
            types = set(map(type, inner))
            if types <= _NUMBER_TYPES and (isinstance(each, dict) or not counts_numbers):
                continue  # token ids, embeddings, or a bias of tokens
            if types != {list} or counts_numbers:
                found += len(each)
            if found > most:
                return found
            if not types.isdisjoint((dict, list)):
                below.extend(inner)
        rest = below
    return found


def _texts(value: Any, skipped: frozenset[str]) -> Iterator[str]:
    """Yield all texts inside of a value, and the keys of objects if no keys are skipped."""
    rest = [value]
    while rest:
        each = rest.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, list):
            rest.extend(one for one in each if isinstance(one, str | list | dict))
        elif isinstance(each, dict):
            rest.extend(one for key, one in each.items() if key not in skipped)
            if not skipped:
                rest.extend(each)


async def check_body(read: Any, request: Any) -> Any:
    """Check the JSON of a request when it is read (around ``ORJSONRequest.json``)."""
    is_read = hasattr(request, "_json")  # routes read it again
    body = await read(request)
    path = request.url.path
    if is_read or path not in PATHS:
        return body
    try:
        problem = find_problem(path, body, settings().limits, _read_context())
    except Exception:
        log.exception("The plug-in failed to check a body, and refused it.")
        problem = CHECK_FAILED
    if problem is not None:
        raise importlib.import_module("fastapi").HTTPException(400, str(problem))
    return body


def _read_context() -> int:
    from sglang.srt.entrypoints.http_server import get_global_state  # noqa: PLC0415 - present in engines only

    return int(get_global_state().tokenizer_manager.context_len)


def guard_server(*_: Any, **__: Any) -> None:
    """Check each body that SGLang's HTTP server parses (after ``TokenizerManager.__init__``).

    SGLang imports its HTTP server after it has applied the hooks, and only in the process that has a tokenizer manager.
    """
    found = getattr(sys.modules.get("sglang.srt.entrypoints.http_server"), "ORJSONRequest", None)
    if found is None or hasattr(found.json, "__wrapped__"):
        return
    original = found.json

    @functools.wraps(original)
    async def read_checked(request: Any) -> Any:
        return await check_body(original, request)

    found.json = read_checked


def is_active(request: Any) -> bool:
    """Return true if the JSON of this request passed the check. A request that did not come over HTTP needs none."""
    return request is None or hasattr(type(request).json, "__wrapped__")


HOOKS = (Hook("sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__", "AFTER", guard_server),)
