"""What the operator was told at its own start, as opposed to what users write into custom resources."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Settings of the operator that shape what it renders."""

    coordinator_image: str
    """Image with ``sglang-rollout``: agent and coordinator."""
    router_image: str
    """Image with haproxy, smg and ``sglang-rollout``: gate, front and smg."""
    image_pull_policy: str = "IfNotPresent"
    """Pull policy of these two images."""
    version: str = "dev"
    """Release of the operator; for labels and logs, never hashed into a revision."""
