"""How long Python may match a pattern of ``stop_regex``, which SGLang matches after each token. Pure."""

from __future__ import annotations

import re

_REPETITION = re.compile(r"[*+?]|\{\d*(?:,\d*)?\}")


def count_repetitions(pattern: str) -> int | None:
    """Return the number of repetitions of a pattern; None if a match of the pattern may take exponential time.

    None stands for groups that are repeated or that have alternatives, for references, for all that begins with ``(?``, which can also
    change how a pattern is read, and for patterns that do not compile. Takes time in proportion to the length of the pattern.
    """
    number = depth = at = 0
    after_group = False
    while at < len(pattern):
        sign, repeated = pattern[at], _REPETITION.match(pattern, at)
        group, after_group = after_group, False
        if sign == "\\":
            if pattern[at + 1 : at + 2] in ("", "N") or pattern[at + 1].isdecimal():
                return None
            at += 2
        elif sign == "[":
            at = _class_end(pattern, at)
            if not at:
                return None
        elif repeated:
            if group:
                return None
            number += 1
            at = repeated.end()
            at += pattern[at : at + 1] in ("?", "+")  # a?? and a*+ are one repetition each
        else:
            if pattern.startswith("(?", at) or (sign == "|" and depth > 0):
                return None
            depth += (sign == "(") - (sign == ")")
            after_group = sign == ")"
            at += 1
    return number


def _class_end(pattern: str, at: int) -> int:
    """Return the place after a class of characters; 0 if it has no end."""
    at += 1
    at += pattern[at : at + 1] == "^"
    at += pattern[at : at + 1] == "]"
    while at < len(pattern):
        if pattern[at] == "]":
            return at + 1
        at += 2 if pattern[at] == "\\" else 1
    return 0
