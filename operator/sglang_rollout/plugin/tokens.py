"""Rules on prompts: texts, token ids, embeddings. Pure. Each function returns what fills the sentence of its rule, or None."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from .request import Request, first_is_list, show

CHARACTERS_PER_TOKEN = 16
"""Most characters of a text for each token of the context. SGLang measures a text after it has tokenised the whole text, and does nothing
else meanwhile (1.5 s for 1 MiB). Prose has 4 or 5 characters per token and program text fewer; only blanks and repetitions have more."""

_LISTS = (list, tuple)


def find_wrong_texts(request: Request) -> tuple[()] | None:
    """Find a text that is none. Pairs of texts are for models that compare texts."""
    text = request.get("text")
    if text is None or isinstance(text, str):
        return None
    if not isinstance(text, list):
        return ()
    kinds = set(map(type, text))
    if kinds <= {str}:
        return None
    if kinds == {list} and not request.facts.generates:
        return None if all(set(map(type, pair)) <= {str} for pair in text) else ()
    return ()


def find_no_tokens(request: Request) -> tuple[str] | None:
    """Find token ids that are no list, or rows of different levels."""
    ids = request.get("input_ids")
    if ids is not None and (not isinstance(ids, list) or (first_is_list(ids) and set(map(type, ids)) != {list})):
        return ("input_ids",)
    return None


def find_empty_prompt(request: Request) -> tuple[str] | None:
    """Find a prompt without a token. A session may hold the whole prompt. No prompt at all is harmless: SGLang answers with no sample."""
    ids = request.get("input_ids")
    if ids is None or (ids == [] and (_has_session(request) or request.get("text") is None)):
        return None  # SGLang itself refuses an empty prompt outside a session
    return ("input_ids",) if ids == [] or (first_is_list(ids) and not all(ids)) else None


def _has_session(request: Request) -> bool:
    params = request.get("session_params")
    return isinstance(params, dict) and bool(params.get("id"))


def find_many_prompts(request: Request) -> tuple[str, int, int, str] | None:
    """Find more prompts than the limit."""
    name, number, _ = request.prompts
    most = request.limits.prompts_per_request
    return (name, number, most, "promptsPerRequest") if number > most else None


def find_long_text(request: Request) -> tuple[str, int, int, int] | None:
    """Find a text that cannot fit into the context."""
    most = CHARACTERS_PER_TOKEN * request.facts.context
    for text in _texts(request.get("text")):
        if len(text) > most:
            return "text", len(text), CHARACTERS_PER_TOKEN, request.facts.context
    return None


def _texts(text: Any) -> Iterator[str]:
    for item in text if isinstance(text, list) else [text]:
        yield from (one for one in (item if isinstance(item, list) else [item]) if isinstance(one, str))


def _rows(request: Request) -> Iterator[list[Any]]:
    """Yield the token ids of each prompt, also beside a text, which SGLang then ignores or not."""
    ids = request.get("input_ids")
    if isinstance(ids, list) and ids:
        yield from ids if first_is_list(ids) else [ids]


def find_wrong_token(request: Request) -> tuple[str, str] | None:
    """Find a token id that is no whole number."""
    for row in _rows(request):
        if set(map(type, row)) - {int}:
            return "input_ids", show(next(one for one in row if type(one) is not int))
    return None


def find_outside_token(request: Request) -> tuple[str, str, int] | None:
    """Find a token id that the model does not have."""
    most = request.facts.vocabulary
    for row in _rows(request):
        if row and (min(row) < 0 or max(row) >= most):
            return "input_ids", show(next(one for one in row if not 0 <= one < most)), most - 1
    return None


def _prompts_of_embeddings(found: Any) -> Iterator[list[Any]]:
    yield from found if first_is_list(found) and first_is_list(found[0]) else [found]


def find_wrong_embeddings(request: Request) -> tuple[()] | None:
    """Find embeddings that SGLang cannot turn into a tensor of finite numbers."""
    found = request.get("input_embeds")
    if found is None:
        return None
    for prompt in _prompts_of_embeddings(found):
        if not isinstance(prompt, list) or not prompt or set(map(type, prompt)) != {list}:
            return ()
        if len(set(map(len, prompt))) != 1 or not prompt[0]:
            return ()
        if not all(set(map(type, row)) <= {int, float} and all(map(_fits, row)) for row in prompt):
            return ()
    return None


def _fits(number: float) -> bool:
    return -3.4e38 < number < 3.4e38 and math.isfinite(number)


def find_wrong_width(request: Request) -> tuple[int, int] | None:
    """Find embeddings of another width than the model's."""
    found, width = request.get("input_embeds"), request.facts.hidden
    if found is None or not width:
        return None
    return next(((len(prompt[0]), width) for prompt in _prompts_of_embeddings(found) if len(prompt[0]) != width), None)


def find_no_token(request: Request) -> tuple[()] | None:
    """Find a prompt whose text gave no token. A session may hold the whole prompt."""
    ids = request.get("input_ids")
    return () if ids is not None and len(ids) == 0 and not _has_session(request) and not request.get("has_embeddings") else None


def find_token_of_tokenizer(request: Request) -> tuple[str, int] | None:
    """Find a token that the tokenizer has and the model has not."""
    ids, most = request.get("input_ids"), request.facts.vocabulary
    if ids is None or len(ids) == 0 or (min(ids) >= 0 and max(ids) < most):
        return None
    return show(next(one for one in ids if not 0 <= one < most)), most - 1
