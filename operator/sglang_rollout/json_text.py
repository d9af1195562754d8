"""Read JSON that another process or a user has written. Every module reads JSON by this function."""

from __future__ import annotations

import json
from typing import Any


def load_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Takes time in proportion to the length: Python refuses numbers of more than 4300 digits, for which it would need the square.

    Raises:
        ValueError: The text is not JSON, nests too deep, or has too long a number. ``json.JSONDecodeError`` names the place of an error.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it nests too deep") from error
