"""Messages between coordinator, agents, operator and trainers: models, reason codes, paths and ports. No I/O, no decisions.

Field names are snake_case on the wire, as in SGLang's own API. Unknown fields are ignored, so that adjacent releases understand each
other; a model only gains fields with defaults.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict


class Message(BaseModel):
    """Base class of all messages: immutable; ignores fields that a newer peer adds."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


_SHOWN = 60
"""Characters of a field's name that a message quotes."""


def unwritable(fields: Mapping[str, object]) -> str:
    """Return why a field cannot be encoded as UTF-8, as a sentence; empty if all fields can.

    JSON can name one half of a surrogate pair (``"\\ud83d"``: a text that was cut inside an emoji, or a path that is not UTF-8).
    Python reads and sends it, but no record that contains it can be written."""
    for name, value in fields.items():
        if _half(name) or _half(value):
            shown = name.encode("ascii", "backslashreplace").decode()[:_SHOWN]
            return f"{shown} holds half of a character (a lone surrogate), which UTF-8 cannot encode: send whole characters."
    return ""


def _half(value: object) -> bool:
    """Return whether a value contains a lone surrogate; without recursion, because the nesting may be as deep as Python allows."""
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
