"""What is asked while things break, and which tokens must come with which weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_rollout.testing.tokens import advance, next_token, start

PROMPT = [4, 5, 6]
BASE = "base"
"""What the operator calls the weights that engines start with."""
FEW, MANY = 6, 60
"""Tokens of an answer; the long ones are under way when an update comes."""
Says = Callable[[Sequence[int], int], list[int] | None]
"""So many tokens that some weights generate after the prompt and these tokens; None: nobody can tell."""


def stand_in(policy: bytes) -> Says:
    """What a stand-in says that holds the weights with this digest."""

    def says(before: Sequence[int], count: int) -> list[int]:
        context, tokens = start(PROMPT), []
        for token in before:
            context = advance(context, token)
        for _ in range(count):
            tokens.append(next_token(policy, context))
            context = advance(context, tokens[-1])
        return tokens

    return says


def known(tokens: list[int]) -> Says:
    """What an engine says whose tokens after the prompt are known, and nothing else of it."""
    return lambda before, count: None if before else tokens[:count]
