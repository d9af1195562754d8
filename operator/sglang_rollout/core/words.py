"""How sentences for people are put together. Pure."""

from __future__ import annotations


def sentence(text: str) -> str:
    """Return ``text`` with one full stop at its end; what it quotes (a log line, the scheduler) may have brought its own."""
    stripped = text.rstrip()
    return stripped if stripped.endswith((".", "!", "?")) else f"{stripped}."
