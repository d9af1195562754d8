"""Tests of the word check in `make lint`."""

from __future__ import annotations

import pytest

from e2e.check_words import ADVICE, advice_for, find_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It is made anew.", ["anew"]),
        ("An engine is TOLD\nby whoever", ["TOLD", "whoever"]),
        ("row.told_at = 1", ["told_at"]),
        ("in Kueue's words", ["in Kueue's words"]),
        ("lent_apart", ["lent"]),
        ("excellent, talented, lifecycle, lifetime, renewed", []),
    ],
)
def test_whole_words_are_found_also_in_names(text: str, words: list[str]) -> None:
    assert [word for _, word in find_words(text)] == words


def test_findings_have_line_numbers_and_advice() -> None:
    assert find_words("a\nb\nit goes on") == [(3, "goes on")]
    assert advice_for("goes on") == "continues"
    assert all(ADVICE.values())
