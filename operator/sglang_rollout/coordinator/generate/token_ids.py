"""Token ids in bodies for embeddings, rewards and scores. Pure; the coordinator asks before it sends a body to an engine.

SGLang also takes a token id that is written as a string. The gate's filter reads numbers only, so the coordinator refuses such a body.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_IDS = ("input_ids", "label_token_ids", "stop_token_ids", "tokens")
"""Fields that hold token ids, also in lists of lists."""
_IDS_OR_TEXT = ("input", "query", "items", "prompt")
"""Fields that hold token ids or texts, and never both in one list."""


def why_mixed(body: Mapping[str, Any]) -> str | None:
    """Return the sentence about the first field whose token ids are not all numbers; None for a body that is in order."""
    sampling = body.get("sampling_params")
    rows = [body, *(sampling if isinstance(sampling, list) else [sampling])]
    for key in _IDS:
        lists = (found for row in rows if isinstance(row, Mapping) for found in _lists(row.get(key)))
        if any(isinstance(item, str) for found in lists for item in found):
            return f"{key} holds a string: write token ids as numbers."
    for key in _IDS_OR_TEXT:
        for found in _lists(body.get(key)):
            texts = sum(isinstance(item, str) for item in found)
            if texts and texts < len(found):
                return f"{key} holds strings beside other values in one list: use token ids or texts."
    return None


def _lists(value: Any) -> Iterator[list[Any]]:
    """The lists in a value, at any depth."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, list):
            yield found
            waiting += [item for item in found if isinstance(item, list)]
