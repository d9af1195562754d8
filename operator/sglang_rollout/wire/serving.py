"""The answer of ``GET /fleet/serving``: what the batch server needs to know of the fleet."""

from __future__ import annotations

from sglang_rollout.wire import Message


class Serving(Message):
    """What the fleet serves now."""

    held: str = ""
    """Why no engine may generate; empty if engines may."""
    keeps_requests: bool = False
    """True while ``held`` is a pause: requests that the batch server has accepted wait for its end, as those do that engines have."""
    engines: tuple[str, ...] = ()
    """Base URLs of the gates of serving engines."""
    adapters: tuple[str, ...] = ()
    """Names of LoRA adapters that requests may name."""
