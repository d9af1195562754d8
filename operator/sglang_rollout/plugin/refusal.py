"""Why the plug-in refuses a request: a code for programs, and a sentence. Pure.

SGLang's answers have one text for both, the code first. Only this module writes and reads that text.
"""

from __future__ import annotations

from dataclasses import dataclass

ABOVE_LIMIT, ADAPTER, ENDS, NOT_ACCEPTED, UNREADABLE = (
    "above_limit",
    "adapter_not_loaded",
    "would_end_the_engine",
    "not_accepted",
    "unreadable_body",
)
CODES = frozenset((ABOVE_LIMIT, ADAPTER, ENDS, NOT_ACCEPTED, UNREADABLE))


@dataclass(frozen=True)
class Refusal:
    """Why a request is refused."""

    code: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.code}: {self.sentence}"


CHECK_FAILED = Refusal(UNREADABLE, "the check of this request failed; the engine's log has the error.")


def read_refusal(message: str) -> Refusal | None:
    """Return the plug-in's refusal in the message of SGLang's answer; None if SGLang itself refused the request."""
    code, _, sentence = message.partition(": ")
    return Refusal(code, sentence) if code in CODES and sentence else None
