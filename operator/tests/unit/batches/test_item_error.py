"""The message of a refused item of a batch."""

from __future__ import annotations

import pytest

from sglang_rollout.batches.streams import ItemError


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b'{"error": {"message": "too long"}}', "application/json", "too long"),
        (b"Failed to deserialize the JSON body", "text/plain; charset=utf-8", "Failed to deserialize the JSON body"),
        (b"x" * 5000, "text/plain", "x" * 2000),
        (b"<html>", "text/html", "HTTP 422"),
        (b"", "text/plain", "HTTP 422"),
        (b"[1]", "application/json", "HTTP 422"),
    ],
)
def test_an_item_that_is_refused_in_a_stream_keeps_its_reason(body: bytes, kind: str, message: str) -> None:
    assert ItemError(422, body, {"Content-Type": kind}).message == message
