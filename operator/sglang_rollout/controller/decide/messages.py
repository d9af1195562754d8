"""Wording that several messages share. Pure."""

from __future__ import annotations


def end_sentence(text: str) -> str:
    """Return ``text`` with exactly one full stop, because quoted logs and messages may end with one."""
    stripped = text.rstrip()
    return stripped if stripped.endswith((".", "!", "?")) else f"{stripped}."


def describe_partial_commit(version: str, engines: int, reason: str) -> str:
    """Return the message about a version that some engines did not commit."""
    count = f"{engines} engine{'' if engines == 1 else 's'}"
    return end_sentence(f"Version {version} is committed on {count}; the other engines wait for weights: {reason}")
