"""Texts on a screen of fixed width: times, sizes, wrapped sentences and tables. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import groupby

_LONGEST_UNITS = ((172_800, 86_400, "d"), (7_200, 3_600, "h"), (120, 60, "min"))
"""From this number of seconds on, in this unit."""
_GAP = "  "
_MAX_CELL_CHARACTERS = 40
"""Longest content of a cell. Versions and authors are chosen by trainers."""


def format_seconds(seconds: float) -> str:
    """Return a duration for people: ``340 ms``, ``2.1 s``, ``95 s``, ``12 min``, ``5 h``, ``3 d``."""
    if seconds < 1:
        return f"{max(seconds, 0) * 1000:.0f} ms"
    for least, unit, name in _LONGEST_UNITS:
        if seconds >= least:
            return f"{seconds // unit:.0f} {name}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def format_age(time: str, now: datetime) -> str:
    """Return how long ago a time (RFC 3339) was. If the clocks differ, it is at least ``0 s``."""
    seconds = max((now - datetime.fromisoformat(time)).total_seconds(), 0)
    return f"{seconds:.0f} s" if seconds < 10 else format_seconds(seconds)


def format_bytes(size: int) -> str:
    """Return a size with a decimal unit, as disks and networks have: ``15.2 GB``."""
    value, units = float(size), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.0f} {units[0]}" if value >= 100 or units[0] == "B" else f"{value:.1f} {units[0]}"


def clean(text: str) -> str:
    """Return a text as one line without control characters, which could change what a terminal shows."""
    return "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))


def cut(text: str, width: int) -> str:
    """Return a text of at most ``width`` characters."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def wrap(label: str, text: str, *, width: int, indent: int, most: int) -> list[str]:
    """Return a label in the margin and a sentence beside it, on at most ``most`` lines.

    Args:
        label: Text in the margin of the first line.
        text: The sentence.
        width: Characters of a line.
        indent: Width of the margin.
        most: Lines. Of a longer sentence the end is cut.
    """
    lines = textwrap.wrap(clean(text), max(width - indent, 20), break_on_hyphens=False) or [""]
    if len(lines) > most:
        lines = [*lines[: most - 1], cut(" ".join(lines[most - 1 :]), max(width - indent, 20))]
    margins = [label.ljust(indent), *[" " * indent] * (len(lines) - 1)]
    return [cut(f"{margin}{line}".rstrip(), width) for margin, line in zip(margins, lines, strict=True)]


def table(label: str, rows: Sequence[Sequence[str]], *, width: int, indent: int) -> list[str]:
    """Return a table beside a label in the margin. Columns without content are left out; the first row is the header."""
    used = [column for column in range(len(rows[0])) if any(row[column] for row in rows[1:])]
    cells = [[cut(clean(row[column]), _MAX_CELL_CHARACTERS) for column in used] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(used))]
    lines = [_GAP.join(cell.ljust(wide) for cell, wide in zip(row, widths, strict=True)) for row in cells]
    margins = [label, *[""] * (len(lines) - 1)]
    return [cut(f"{margin.ljust(indent)}{line}".rstrip(), width) for margin, line in zip(margins, lines, strict=True)]


def format_ranges(numbers: Sequence[int]) -> str:
    """Return numbers in order, consecutive ones as a range: ``0-2, 5``."""
    return ", ".join(_ranges(sorted(numbers)))


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}"
