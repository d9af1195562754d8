"""Times, sizes and numbers as people read them."""

from __future__ import annotations

import pytest

from sglang_rollout.overview.text import format_age, format_bytes, format_ranges, format_seconds, wrap
from tests.unit.overview.scenes import NOW


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0344, "34 ms"), (1, "1.0 s"), (9.94, "9.9 s"), (95, "95 s"), (120, "2 min"), (7199, "119 min"), (7200, "2 h"), (172_799, "47 h"),
        (200_000, "2 d"),
    ],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("time", "text"),
    [("2026-11-21T03:00:28.5Z", "2 s"), ("2026-11-21T03:01:00Z", "0 s"), ("2026-11-21T00:00:30+00:00", "3 h")],
)
def test_ages(time: str, text: str) -> None:
    assert format_age(time, NOW) == text


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (999, "999 B"), (15_231_233_024, "15.2 GB"), (2 * 10**15, "2000 TB")])
def test_sizes(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_ranges() -> None:
    assert format_ranges([5, 0, 1, 2, 9, 10]) == "0-2, 5, 9-10"


def test_a_long_sentence_is_wrapped_and_cut() -> None:
    lines = wrap("Note", "one two three four five six seven eight nine ten eleven twelve", width=34, indent=10, most=2)
    assert lines == ["Note      one two three four five", "          six seven eight nine te…"]
