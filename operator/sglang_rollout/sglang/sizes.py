"""Parallel sizes of an engine, as SGLang's ``/server_info`` has them, and what follows from them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def read_size(info: Mapping[str, Any], key: str) -> int | None:
    """Return a size; None if the engine does not report it."""
    value = info.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def read_replicas(info: Mapping[str, Any]) -> int:
    """Return the number of the model's replicas in one engine (``--dp-size``).

    Releases up to 0.5.21 report the width of attention data parallelism as ``dp_size``; such an engine has one replica.
    """
    return 1 if info.get("enable_dp_attention") else read_size(info, "dp_size") or 1


def count_schedulers(info: Mapping[str, Any]) -> int:
    """Return the number of scheduler processes of an engine, in all its pods."""
    return (read_size(info, "tp_size") or 1) * (read_size(info, "pp_size") or 1) * read_replicas(info)


def loads_folders(replicas: int) -> bool:
    """Return whether an engine loads staged versions as folders: SGLang gives our loader, like all tensors, to a single replica only."""
    return replicas > 1
