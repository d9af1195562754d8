"""What the all-reduce before the start reached: a file that the engine's container writes."""

from __future__ import annotations

from pathlib import Path


def read(file: Path) -> float | None:
    """GB/s; None where nothing was measured."""
    try:
        return float(file.read_text())
    except (OSError, ValueError):
        return None
