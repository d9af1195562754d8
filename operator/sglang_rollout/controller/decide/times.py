"""Times as the API server writes them. Pure."""

from __future__ import annotations

from datetime import datetime


def seconds_since(time: str | None, now: str) -> float:
    """Return the seconds between two times (RFC 3339); 0 if the first one is missing."""
    return (datetime.fromisoformat(now) - datetime.fromisoformat(time or now)).total_seconds()
