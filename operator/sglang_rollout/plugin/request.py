"""A request as the rules see it: SGLang's object, what is known about the engine, and the settings. Pure."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .settings import Limits, Settings


@dataclass(frozen=True)
class Facts:
    """What the engine's process knows about itself and about the way of a request."""

    vocabulary: int
    """Tokens of the model."""
    is_generation: bool = True
    """False for a reward model."""
    generates: bool = True
    """True for a ``GenerateReqInput``."""
    context: int = 2**20
    """Tokens of the model's context."""
    hidden: int = 0
    """Numbers of one row of embeddings; 0 if unknown."""
    adapters: frozenset[str] | None = None
    """Names of the loaded adapters; None if the engine loads none."""
    path: str = ""
    """Path of the HTTP request; empty for a request of the process itself."""


@dataclass(frozen=True)
class Request:
    """A request that the rules check. Nothing here trusts the type of a field."""

    obj: Any
    facts: Facts
    settings: Settings

    def get(self, name: str) -> Any:
        """Return a field of SGLang's object; None if this release has no such field."""
        return getattr(self.obj, name, None)

    @property
    def limits(self) -> Limits:
        """The limits of the spec."""
        return self.settings.limits

    @property
    def params(self) -> Iterator[dict[Any, Any]]:
        """Each object of ``sampling_params``. What is no object, a rule refuses."""
        found = self.get("sampling_params")
        yield from (one for one in (found if isinstance(found, list) else [found]) if isinstance(one, dict))

    def values(self, key: str) -> Iterator[Any]:
        """Each value of a sampling parameter that is not None."""
        return (value for one in self.params if (value := one.get(key)) is not None)

    @functools.cached_property
    def prompts(self) -> tuple[str, int, bool]:
        """Name of the field with the prompts, their number, and true if SGLang reads a list of prompts."""
        text, ids, embeddings = self.get("text"), self.get("input_ids"), self.get("input_embeds")
        if text is not None:
            return ("text", len(text), True) if isinstance(text, list) else ("text", 1, False)
        if ids is not None:
            return ("input_ids", len(ids), True) if first_is_list(ids) else ("input_ids", 1, False)
        if first_is_list(embeddings) and first_is_list(embeddings[0]):
            return "input_embeds", len(embeddings), True
        return "input_embeds", 1, False


def first_is_list(value: Any) -> bool:
    """Return true for a list whose first item is a list: SGLang tells one prompt from several in this way."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)


def show(value: Any, longest: int = 20) -> str:
    """Return a short text about a value, without characters that a log or an answer could misread."""
    text = value if isinstance(value, str) else _describe(value)
    return re.sub(r"[^\w./:@ +-]", "?", text[: longest * 2], flags=re.ASCII)[:longest]


def _describe(value: Any) -> str:
    """Return a value's text if it is a short one; else its type: the text of a long value takes as long as the value."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a huge number"
    return str(value) if isinstance(value, int | float) or value is None else type(value).__name__
