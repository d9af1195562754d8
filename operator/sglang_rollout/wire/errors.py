"""Errors in answers of the fleet and of engines: the message, and the code that programs compare. Pure.

The fleet's own answers have a field ``code``. In SGLang's shapes, ``code`` is the HTTP status, and the plug-in's code begins the message.
Only this module knows these shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_rollout.plugin.refusal import read_refusal


@dataclass(frozen=True, slots=True)
class AnsweredError:
    """Why a call was refused or failed."""

    message: str
    """The sentence for people."""
    code: str | None = None
    """The code for programs, such as ``above_limit`` or ``Forbidden``; None if the answer has none."""

    def __str__(self) -> str:
        """Return the text of an answer in SGLang's shape."""
        return f"{self.code}: {self.message}" if self.code else self.message


def read_error(answer: Mapping[str, Any]) -> AnsweredError | None:
    """Return the error in an answer or in an event of a stream; None if it has none."""
    error = answer.get("error")
    places = (answer, error if isinstance(error, Mapping) else {"message": error})
    message = next((str(place["message"]).strip() for place in places if place.get("message")), "")
    refusal = read_refusal(message)
    if refusal is not None:
        return AnsweredError(refusal.sentence, refusal.code)
    code = next((place["code"] for place in places if isinstance(place.get("code"), str)), None)
    return AnsweredError(message, code) if message else None
