"""Base of the messages between the parts, as pydantic models.

Field names are snake_case on the wire, as in SGLang's own API. Unknown fields are ignored, so that neighbouring releases
understand each other; a model only ever gains fields with defaults.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict


class Message(BaseModel):
    """Base of all messages: immutable, tolerant of fields that a newer peer adds."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


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
