"""How sentences for people are put together. Pure."""

from __future__ import annotations

LENT = "Asleep: the trainer "
"""How ``Ready`` begins while engines sleep because the trainer wants it, and not ``spec.state``."""


def sentence(text: str) -> str:
    """Return ``text`` with one full stop at its end; what it quotes (a log line, the scheduler) may have brought its own."""
    stripped = text.rstrip()
    return stripped if stripped.endswith((".", "!", "?")) else f"{stripped}."


def partly(version: str, engines: int, reason: str) -> str:
    """Return what is to be said of a version that some engines did not reach the end of."""
    count = f"{engines} engine{'' if engines == 1 else 's'}"
    return sentence(f"Version {version} is committed on {count}; left behind until they get weights: {reason}")
