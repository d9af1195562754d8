"""Deterministic generation: the next token is a pure function of the held tensors' bytes and of the tokens before.

    context 0  = SHA-256(prompt ids, 4 bytes each, little endian)
    token i    = 3 + (first 8 bytes of SHA-256(policy digest + context i), big endian) mod (vocabulary - 3)
    context i+1 = SHA-256(context i + token i, 4 bytes)

The policy digest covers names, types, shapes and bytes of all tensors: one changed bit changes all tokens. Sampling parameters such as the
temperature change nothing. Tokens 0 to 2 are never generated: they are the usual padding, start and end.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_rollout.testing.weights import held_from, policy_digest

VOCABULARY = 2048
"""Token IDs are below this number."""
_SPECIAL = 3


def start(prompt: Sequence[int]) -> bytes:
    """Return the context of a prompt."""
    return hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in prompt)).digest()


def next_token(policy: bytes, context: bytes, vocabulary: int = VOCABULARY) -> int:
    """Return the token that follows a context under a policy."""
    number = int.from_bytes(hashlib.sha256(policy + context).digest()[:8], "big")
    return _SPECIAL + number % (vocabulary - _SPECIAL)


def advance(context: bytes, token: int) -> bytes:
    """Return the context after one more token."""
    return hashlib.sha256(context + token.to_bytes(4, "little")).digest()


def logprob(policy: bytes, context: bytes) -> float:
    """Return a log-probability for ``return_logprob``: between -8 and 0, and as deterministic as the token."""
    return -8.0 * hashlib.sha256(b"logprob" + policy + context).digest()[0] / 256


def expected_tokens(
    state_dict: Mapping[str, Any], prompt_ids: Sequence[int], max_new_tokens: int, *, vocabulary: int = VOCABULARY
) -> list[int]:
    """Return the tokens that a stand-in generates if it holds exactly these tensors.

    A test can prove with it which version answered, whatever the reply claims.

    Args:
        state_dict: All tensors of the model (torch tensors, numpy arrays or ``Held``), in the types that the engine holds.
        prompt_ids: Token IDs of the prompt.
        max_new_tokens: Number of tokens to generate.
        vocabulary: Token IDs are below this number.
    """
    policy = policy_digest(held_from(state_dict))
    context, tokens = start(prompt_ids), []
    for _ in range(max_new_tokens):
        tokens.append(next_token(policy, context, vocabulary))
        context = advance(context, tokens[-1])
    return tokens


def encode(text: str, vocabulary: int = VOCABULARY) -> list[int]:
    """Return the token IDs of a text: `` t17`` is token 17, any other word gets an ID from its hash."""
    return [_id(word, vocabulary) for word in text.split()]


def decode(tokens: Sequence[int]) -> str:
    """Return a text that encodes to these tokens."""
    return "".join(f" t{token}" for token in tokens)


def _id(word: str, vocabulary: int) -> int:
    named = re.fullmatch(r"t(\d{1,9})", word)
    if named and int(named[1]) < vocabulary:
        return int(named[1])
    return _SPECIAL + int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big") % (vocabulary - _SPECIAL)
