"""Patterns of stop_regex that pass the plug-in have no structure for which Python's matcher needs exponential time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.plugin.patterns import count_repetitions

# The parser of Python's own patterns, which SGLang uses, too.
parser: Any = pytest.importorskip("re._parser")

MOST = 2
REPEATS = {"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"}
SINGLE = {"LITERAL", "NOT_LITERAL", "ANY", "IN", "CATEGORY"}

pieces = st.sampled_from(
    [
        *"ab.()[]{}|*+?^$\\-#,1 \n",
        "(?",
        "(?:",
        "(?#",
        "(?x)",
        "(?P<n>",
        "(?=",
        "{2}",
        "{1,}",
        "{,3}",
        "[^",
        "\\d",
        "\\(",
        "\\]",
        "\\1",
        '"',
        "é",
    ]
)
patterns = st.lists(pieces, max_size=12).map("".join)


def nodes(parsed: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name of each node of a parsed pattern, and the names of the nodes above it."""
    for operation, value in parsed:
        name = str(operation)
        yield name, above
        below = (*above, name)
        if name in REPEATS:
            yield from nodes(value[2], below)
        elif name == "SUBPATTERN":
            yield from nodes(value[3], below)
        elif name == "BRANCH":
            for branch in value[1]:
                yield from nodes(branch, below)


def unsafe(pattern: str) -> str:
    """Return what is unsafe in a pattern; empty if nothing is, or if SGLang refuses the pattern itself."""
    try:
        found = list(nodes(parser.parse(pattern)))
    except re.error:
        return ""
    for name, above in found:
        if name not in SINGLE | REPEATS | {"SUBPATTERN", "BRANCH", "AT"}:
            return name
        if above and above[-1] in REPEATS and name not in SINGLE:
            return f"{name} is repeated"
        if name == "BRANCH" and "SUBPATTERN" in above:
            return "a group with alternatives"
    return "repetitions" if sum(name in REPEATS for name, _ in found) > MOST else ""


@given(patterns)
def test_patterns_that_pass_are_safe(pattern: str) -> None:
    found = count_repetitions(pattern)
    assert found is None or found > MOST or not unsafe(pattern)


def test_the_check_of_this_test_finds_unsafe_patterns() -> None:
    evil = ["(a|b)*", "(.|..)!", "(ab)+", "(?=a)", r"(a)\1", "a*b*c*", "(?#[)(.*)*(?#])"]
    assert [pattern for pattern in evil if not unsafe(pattern)] == []
    assert [pattern for pattern in ("a*|b+", "(ab)c?", r"[^\]]+$", "ab|cd") if unsafe(pattern)] == []
