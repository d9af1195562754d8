"""The operator's clock."""

from __future__ import annotations

import datetime


def utc_now() -> str:
    """Return the time in Kubernetes' format."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
