"""The error in an answer, as an object or as an event of a stream."""

from __future__ import annotations

from typing import Any

import requests

from sglang_rollout.json_text import load_json
from sglang_rollout.wire.errors import AnsweredError, read_error

_MAX_QUOTED = 200


def parse_object(response: requests.Response) -> dict[str, Any]:
    """Return the JSON object of an answer; empty if the answer is something else (SGLang answers some calls with text)."""
    try:
        value = load_json(response.content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def read_reason(response: requests.Response) -> AnsweredError:
    """Return why a call was refused: the body's message, else the HTTP reason phrase, else the start of the body.

    smg refuses some values with plain text, which says more than the phrase.
    """
    texts = [response.reason, response.text[:_MAX_QUOTED]]
    if response.headers.get("Content-Type", "").startswith("text/plain"):
        texts.reverse()
    return read_error(parse_object(response)) or AnsweredError(next((text.strip() for text in texts if text), "no reason given"))


def find_error(response: requests.Response) -> AnsweredError | None:
    """Return the error in an answer with status 200: an object, or an event of a stream; None if there is none."""
    objects = [parse_object(response)]
    if response.headers.get("Content-Type", "").startswith("text/event-stream"):
        objects = list(filter(None, map(_parse_event, response.text.splitlines())))
    return next((read_error(each) for each in objects if "error" in each), None)


def _parse_event(line: str) -> dict[str, Any] | None:
    try:
        value = load_json(line.removeprefix("data:")) if line.startswith("data:") else None
    except ValueError:
        return None  # such as [DONE]
    return value if isinstance(value, dict) else None
