"""Kubernetes quantities, as far as comparing them needs it: ``1000m`` is ``1``."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

_QUANTITY = re.compile(r"^([+-]?\d+(?:\.\d*)?|\.\d+)(?:([eE][+-]?\d+)|(Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E)?)$")
_FACTORS = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "k": Decimal(10) ** 3,
    "M": Decimal(10) ** 6,
    "G": Decimal(10) ** 9,
    "T": Decimal(10) ** 12,
    "P": Decimal(10) ** 15,
    "E": Decimal(10) ** 18,
    "Ki": Decimal(2) ** 10,
    "Mi": Decimal(2) ** 20,
    "Gi": Decimal(2) ** 30,
    "Ti": Decimal(2) ** 40,
    "Pi": Decimal(2) ** 50,
    "Ei": Decimal(2) ** 60,
}


def parse(value: Any) -> Decimal | None:
    """Return the number that a quantity stands for; None if it is no quantity."""
    found = _QUANTITY.match(str(value).strip()) if isinstance(value, str | int | float) else None
    if not found:
        return None
    number, exponent, suffix = found.groups()
    return Decimal(number + (exponent or "")) * _FACTORS.get(suffix or "", Decimal(1))


def same(one: Any, other: Any) -> bool:
    """Return whether two values are the same quantity."""
    left, right = parse(one), parse(other)
    return left is not None and left == right
