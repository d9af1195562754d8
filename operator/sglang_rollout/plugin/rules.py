"""The table of rules about requests: what would end an engine, what exceeds a limit, what is not accepted. Pure.

The rules read the object that SGLang has parsed (``GenerateReqInput`` or ``EmbeddingReqInput``), so there is no second parser that could
read a body differently. They check types themselves, because some paths build the object without a check. Each rule takes time in
proportion to the request, and the rules on numbers of prompts come before those that look at each prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import media, sampling, tokens
from .refusal import ABOVE_LIMIT, ADAPTER, ENDS, NOT_ACCEPTED, UNREADABLE, Refusal
from .request import Facts, Request
from .settings import Settings

Arguments = tuple[Any, ...]
_RAISES = "; engine.limits.{} raises it."
_ABOVE = "{} is {:.14g}, above the limit of {}" + _RAISES
_MORE = "{} has more than {} {}" + _RAISES


@dataclass(frozen=True)
class Rule:
    """One rule: a code for programs, a sentence with places, and a function that returns what fills them, or None."""

    code: str
    sentence: str
    find: Callable[[Request], Arguments | None]


RULES: tuple[Rule, ...] = (
    Rule(ENDS, "This engine has a reward model, which generates nothing: use /classify or /v1/embeddings.", sampling.find_wrong_model),
    Rule(UNREADABLE, "text is neither a string nor a list of strings.", tokens.find_wrong_texts),
    Rule(UNREADABLE, "{} is no list of token ids.", tokens.find_no_tokens),
    Rule(ENDS, "{} is empty: give at least one token.", tokens.find_empty_prompt),
    Rule(ABOVE_LIMIT, "The number of prompts in " + _ABOVE, tokens.find_many_prompts),
    Rule(
        ABOVE_LIMIT,
        "{} has {} characters, which is more than {} for each of the {} tokens of the model's context.",
        tokens.find_long_text,
    ),
    Rule(UNREADABLE, "{} holds {}: write token ids as whole numbers.", tokens.find_wrong_token),
    Rule(ENDS, "{} holds token {}; this model's tokens are 0 to {}.", tokens.find_outside_token),
    Rule(
        UNREADABLE, "input_embeds is no list of equally long lists of finite numbers, and no list of these.", tokens.find_wrong_embeddings
    ),
    Rule(ENDS, "input_embeds has rows of {} numbers; this model's rows have {}.", tokens.find_wrong_width),
    Rule(UNREADABLE, sampling.WRONG_PARAMS, sampling.find_wrong_params),
    Rule(NOT_ACCEPTED, "{} is refused: SGLang sets it itself.", sampling.find_internal_field),
    Rule(UNREADABLE, "{} {}", sampling.find_wrong_type),
    Rule(UNREADABLE, "{} is {}: write a number.", sampling.find_no_number),
    Rule(ABOVE_LIMIT, _ABOVE, sampling.find_many_samples),
    Rule(ABOVE_LIMIT, "The number of samples of all prompts is {}, above the limit of {}" + _RAISES, sampling.find_many_samples_of_all),
    Rule(ENDS, "top_k is larger than {}; use -1 for the whole vocabulary.", sampling.find_large_top_k),
    Rule(ENDS, "logit_bias has a value outside the numbers of 32 bits.", sampling.find_large_bias),
    Rule(
        ENDS,
        "stop_token_ids holds token {}; this model's tokens are 0 to {}, and SGLang ends when it suppresses this token for min_new_tokens.",
        sampling.find_suppressed_token,
    ),
    Rule(ENDS, "{} is a list, and the request has one prompt: write one value.", sampling.find_list_for_one_prompt),
    Rule(ENDS, "logprob_start_len is below -1, which means the prompt's end.", sampling.find_early_start),
    Rule(ENDS, "top_logprobs_num is larger than the vocabulary of {} tokens.", sampling.find_impossible_logprobs),
    Rule(ABOVE_LIMIT, _ABOVE, sampling.find_many_logprobs),
    Rule(ABOVE_LIMIT, _MORE, sampling.find_many_logprob_tokens),
    Rule(ABOVE_LIMIT, _MORE, sampling.find_large_grammar),
    Rule(
        ENDS,
        "stop_regex may take forever: write it without (?, references, repeated groups and alternatives in groups.",
        sampling.find_endless_pattern,
    ),
    Rule(ABOVE_LIMIT, _ABOVE, sampling.find_many_repetitions),
    Rule(ENDS, "{} is not offered here: it ends the engine's process.", sampling.find_fatal_field),
    Rule(
        NOT_ACCEPTED,
        "{} is refused: these engines run no code from requests. engine.args with --enable-custom-logit-processor, which"
        " engine.acceptFlags has to list, allows it.",
        sampling.find_processor,
    ),
    Rule(ADAPTER, "LoRA adapter {} is not loaded; GET /fleet lists those that are.", sampling.find_unknown_adapter),
    Rule(ABOVE_LIMIT, _MORE, media.find_large_media),
    Rule(NOT_ACCEPTED, "{} names a file: send its content, as a data: URL or in base64.", media.find_file),
    Rule(
        NOT_ACCEPTED,
        "{} is a URL, which the engine would fetch: send its content as a data: URL, or set engine.limits.mediaUrls.",
        media.find_url,
    ),
)
"""All rules, in their order: a rule may rely on what the rules before it have refused."""

AFTER_TOKENS: tuple[Rule, ...] = (
    Rule(ENDS, "The prompt has no token: give at least one.", tokens.find_no_token),
    Rule(ENDS, "The prompt has token {}; this model's tokens are 0 to {}.", tokens.find_token_of_tokenizer),
)
"""Rules on one prompt whose text SGLang has turned into tokens."""


def check(rules: tuple[Rule, ...], obj: Any, facts: Facts, settings: Settings) -> Refusal | None:
    """Return why a request is refused; None if it passes. Never raises."""
    request = Request(obj, facts, settings)
    for rule in rules:
        found = rule.find(request)
        if found is not None:
            return Refusal(rule.code, rule.sentence.format(*found))
    return None
