"""Text that nobody can write down.

JSON may name one half of a character that takes two (a lone surrogate, ``"\\ud83d"``: a text that was cut in the middle of an emoji, or a
path that is no UTF-8), and Python reads and sends it without a word. But UTF-8 has no bytes for it: no record that holds it can be written.
"""

from __future__ import annotations

from collections.abc import Mapping

_SHOWN = 60
"""Characters of a field's name in a sentence."""


def unwritable(fields: Mapping[str, object]) -> str:
    """Why these fields cannot be written down, as a sentence about the first; empty if they can."""
    for name, value in fields.items():
        if _half(name) or _half(value):
            shown = name.encode("ascii", "backslashreplace").decode()[:_SHOWN]
            return f"{shown} holds half of a character (a lone surrogate), which UTF-8 cannot write: send whole characters."
    return ""


def _half(value: object) -> bool:
    """Without recursion: what was read may nest as deep as Python can."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            if not one.isascii() and _is_half(one):
                return True
        elif isinstance(one, dict):
            left += [*one, *one.values()]
        elif isinstance(one, list):
            left += one
    return False


def _is_half(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
