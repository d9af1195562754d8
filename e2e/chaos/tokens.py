"""Prompts of the fault matrix, and the tokens that each set of weights must generate."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_rollout.testing.policy import advance, next_token, start

PROMPT = [4, 5, 6]
BASE = "base"
"""The operator's label of the weights that engines start with."""
FEW, MANY = 6, 60
"""Answer lengths in tokens. Long answers run when an update begins."""
Expected = Callable[[Sequence[int], int], list[int] | None]
"""Returns the tokens that some weights generate after the prompt and these tokens; None if unknown."""


def stand_in(policy: bytes) -> Expected:
    """Return the expected tokens of a stand-in with the weights of this digest."""

    def generated(before: Sequence[int], count: int) -> list[int]:
        context, tokens = start(PROMPT), []
        for token in before:
            context = advance(context, token)
        for _ in range(count):
            tokens.append(next_token(policy, context))
            context = advance(context, tokens[-1])
        return tokens

    return generated


def known(tokens: list[int]) -> Expected:
    """Return the expected tokens of an engine of which only the tokens after the prompt are known."""
    return lambda before, count: None if before else tokens[:count]
