"""Messages between coordinator, agents, operator and trainers: models, reason codes, paths and ports. No I/O, no decisions.

Field names are snake_case on the wire, as in SGLang's own API. Unknown fields are ignored, so that adjacent releases understand each
other; a model only gains fields with defaults.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict


class Message(BaseModel):
    """Base class of all messages: immutable; ignores fields that a newer peer adds."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


_MAX_NAME_CHARACTERS = 60
"""Characters of a field's name that a message quotes."""
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def find_lone_surrogate(fields: Mapping[str, object]) -> str | None:
    """Return a sentence about the first field that UTF-8 cannot encode; None if it can encode all fields.

    JSON can contain half of a surrogate pair: a text that was cut inside an emoji, or a path that is not UTF-8. Python reads and sends
    it, but no record that contains it can be written.
    """
    for name, value in fields.items():
        if _has_lone_surrogate([name, value]):
            shown = name.encode("ascii", "backslashreplace").decode()[:_MAX_NAME_CHARACTERS]
            return f"{shown} holds half of a character (a lone surrogate), which UTF-8 cannot encode: send whole characters."
    return None


def _has_lone_surrogate(values: list[object]) -> bool:
    """Return whether a value contains a lone surrogate. Does not recurse, because the nesting may be as deep as Python allows."""
    pending = values
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            if not value.isascii() and _LONE_SURROGATE.search(value):
                return True
        elif isinstance(value, dict):
            pending += [*value, *value.values()]
        elif isinstance(value, list):
            pending += value
    return False
