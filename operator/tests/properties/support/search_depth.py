"""Number of examples that property tests try."""

from __future__ import annotations

import os


def examples(count: int) -> int:
    """Return ``count``, multiplied by the environment variable ``EXAMPLES``, whose default is 1."""
    return count * int(os.environ.get("EXAMPLES", "1"))
