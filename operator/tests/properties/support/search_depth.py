"""How long state machines are searched."""

from __future__ import annotations

import os


def examples(count: int) -> int:
    """So many examples; with ``EXAMPLES=40`` 40 times as many, and others each time."""
    return count * int(os.environ.get("EXAMPLES", "1"))
