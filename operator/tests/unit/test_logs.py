"""A line of the log holds one message, whatever text of others the message quotes."""

from __future__ import annotations

import logging

import pytest

from sglang_rollout.logs import make_formatter

FORGED = '2026-11-23 03:12:40,118 INFO    {"method": "POST", "caller": "ml/Job/innocent"}'


def line_of(message: str, error: BaseException | None = None) -> str:
    info = (type(error), error, error.__traceback__) if error is not None else None
    record = logging.LogRecord("sglang_rollout", logging.INFO, "file.py", 1, "%s", (message,), info)
    return make_formatter("text").format(record)


@pytest.mark.parametrize("separator", ["\n", "\r", "\r\n", "\x85", "\u2028", "\x1b[2K", "\x00", "\u202e", "\ud800"])
def test_a_message_cannot_forge_a_line(separator: str) -> None:
    line = line_of(f"version step{separator}{FORGED} committed")
    assert line.isprintable()
    assert len(line.splitlines()) == 1
    assert "committed" in line


def test_text_of_people_stays_readable() -> None:
    assert line_of("Größe für 政策 🚀 C:\\path").endswith("INFO    Größe für 政策 🚀 C:\\path")


def test_a_traceback_stays_readable_and_forges_no_line() -> None:
    try:
        raise ValueError(f"bad\n{FORGED}\x1b[2K")
    except ValueError as error:
        lines = line_of("a defect", error).split("\n")
    assert lines[0].endswith("INFO    a defect")
    assert "    Traceback (most recent call last):" in lines
    assert any(line.startswith("    ValueError: bad") for line in lines)
    assert all(line.startswith("    ") for line in lines[1:]), "each line of a message begins with a time"
    assert all(line.isprintable() for line in lines)
