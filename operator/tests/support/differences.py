"""Apply a difference between two pieces that are in memory."""

from __future__ import annotations

from sglang_rollout.staging.differences import Bytes, decode, exclusive_or


def apply(base: Bytes, difference: Bytes) -> bytes:
    """Return the piece that ``base`` becomes. Raises StagedError for a damaged difference."""
    parts, position = [], 0
    for block in decode(difference, len(base)):
        parts.append(exclusive_or(base[position : position + len(block)], block))
        position += len(block)
    return b"".join(parts)
