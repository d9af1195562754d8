"""The arguments of ``Fleet.generate``: checked before the first request, and resolved into one request per prompt."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SamplingParams = Mapping[str, Any]

MAX_SAMPLES_PER_PROMPT = 1024
"""One engine generates all samples of a prompt and returns them in one JSON document: with log-probabilities, 1024 samples of 8192 tokens
are about 400 MB.
"""


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One prompt and how to sample it."""

    index: int
    prompt: str | list[int]
    sampling_params: dict[str, Any]
    samples: int
    """How many samples the reply must hold."""


def prompt_requests(
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    key: str,
    n: int | None,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
) -> list[PromptRequest]:
    """Return one request per prompt, in order.

    Args:
        prompts: texts or token ids, as ``key`` says.
        key: ``text`` or ``input_ids``.
        n: samples per prompt; None leaves it to ``sampling_params``.
        sampling_params: one mapping for all prompts, or one for each.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A number is out of range, or two arguments disagree.
    """
    checked = _checked_prompts(prompts, key)
    if n is not None:
        n = _checked_n(n, "n")
    each = _params_for_each(sampling_params, n, len(checked))
    return [PromptRequest(index, prompt, *each[index]) for index, prompt in enumerate(checked)]


def _params_for_each(given: Any, n: int | None, prompts: int) -> list[tuple[dict[str, Any], int]]:
    if given is None or isinstance(given, Mapping):
        return [_resolved(given or {}, n, "sampling_params")] * prompts
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise TypeError(f"sampling_params is {_named(given)}; expected a mapping, or a list with one mapping for each prompt.")
    if len(given) != prompts:
        raise ValueError(f"{len(given)} sampling_params for {prompts} prompts; give one for all, or one for each.")
    return [_resolved(params, n, f"sampling_params[{index}]") for index, params in enumerate(given)]


def _checked_prompts(prompts: Sequence[str] | Sequence[Sequence[int]], key: str) -> list[str | list[int]]:
    name = "prompts" if key == "text" else key
    if isinstance(prompts, str | bytes):
        raise TypeError(f"{name} is {_named(prompts)}; expected a list: {name}=[...].")
    return [_text(each, f"{name}[{i}]") if key == "text" else _token_ids(each, f"{name}[{i}]") for i, each in enumerate(prompts)]


def _text(prompt: Any, name: str) -> str:
    if not isinstance(prompt, str):
        raise TypeError(f"{name} is {_named(prompt)}; expected a text. Pass token ids as input_ids=.")
    return prompt


def _token_ids(prompt: Any, name: str) -> list[int]:
    try:
        return [operator.index(token) for token in prompt]  # NumPy's integers, too, which JSON cannot write
    except TypeError as error:
        raise TypeError(f"{name} is {_named(prompt)}; expected a list of integer token ids. Pass texts as prompts=.") from error


def _resolved(params: Any, n: int | None, name: str) -> tuple[dict[str, Any], int]:
    """Return the parameters to send, and the number of samples that the reply must hold."""
    if not isinstance(params, Mapping):
        raise TypeError(f"{name} is {_named(params)}; expected a mapping such as {{'max_new_tokens': 64}}.")
    fields = dict(params)
    own = fields.pop("n", None)
    if own is not None:
        own = _checked_n(own, f"{name}['n']")
    if n is not None and own is not None and own != n:
        raise ValueError(f"n={n}, but {name} has n={own}. Give one of them.")
    samples = n or own or 1
    if samples != 1:
        fields["n"] = samples
    try:
        json.dumps(fields, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be sent as JSON: {error}.") from error
    # With a beam search, SGLang returns one sample, which lists n beams in meta_info["beam_results"].
    width = fields.get("beam_width")
    return fields, 1 if isinstance(width, int) and width > 1 else samples


def _checked_n(n: Any, name: str) -> int:
    if isinstance(n, bool):
        raise TypeError(f"{name} is {n}; expected an integer.")
    try:
        number = operator.index(n)
    except TypeError:
        raise TypeError(f"{name} is {_named(n)}; expected an integer.") from None
    if not 1 <= number <= MAX_SAMPLES_PER_PROMPT:
        more = " Repeat the prompt to get more: repeated prompts spread over the engines." if number > 1 else ""
        raise ValueError(f"{name} is {number}; expected 1 to {MAX_SAMPLES_PER_PROMPT} samples per prompt.{more}")
    return number


def _named(value: Any) -> str:
    """Return a value and its type, short."""
    shown = repr(value)
    return f"{shown if len(shown) <= 60 else shown[:60] + '…'} ({type(value).__name__})"
