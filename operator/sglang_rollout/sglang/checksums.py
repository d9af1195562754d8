"""Checksums of an engine's weights, as SGLang computes them (``/weights_checker``). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHECKSUM = {"action": "checksum"}
"""Body of the call."""
Checksums = tuple[str, ...]
"""One checksum per rank and data-parallel replica, in this order."""


def parse_checksums(body: Any) -> Checksums | None:
    """Return the checksums in SGLang's answer; None for any other answer."""
    ranks = body.get("ranks") if isinstance(body, dict) else None
    if not isinstance(ranks, list) or not ranks:
        return None
    try:
        ordered = sorted(ranks, key=_rank_key)
        return tuple(str(rank["per_gpu_checksum"]) for rank in ordered)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError):
        return None


def find_unequal_replicas(body: Any) -> str:
    """Return the first rank whose data-parallel replicas have different checksums in SGLang's answer, as a clause; empty if none has.

    Replicas of a rank have the same number. Only such ranks hold the same weights.
    """
    if parse_checksums(body) is None:
        return ""
    found: dict[tuple[str, int], set[str]] = {}
    for rank in body["ranks"]:
        found.setdefault(_rank_key(rank)[:2], set()).add(str(rank["per_gpu_checksum"]))
    unequal = next((key for key, checksums in sorted(found.items()) if len(checksums) > 1), None)
    return "" if unequal is None else f"rank {unequal[1]} has {' and '.join(sorted(found[unequal]))}"


def find_difference(right: Checksums, found: Checksums) -> str:
    """Return the first rank whose checksum differs from the right one, as a clause."""
    pairs = ((rank, a, b) for rank, (a, b) in enumerate(zip(right, found, strict=False)) if a != b)
    return next((f"rank {rank} has {b}, not {a}" for rank, a, b in pairs), f"{len(found)} ranks, not {len(right)}")


def _rank_key(rank: Mapping[str, Any]) -> tuple[str, int, int]:
    """Return the sort key of a rank: role, rank, replica.

    ``parallelism_info`` lists one entry per model; in 0.5.20 it is a single entry without a role.
    """
    found = rank["parallelism_info"]
    first = found[0] if isinstance(found, list) else found
    return str(first.get("role", "")), int(first["rank"]), int(first.get("dp_rank", 0))
