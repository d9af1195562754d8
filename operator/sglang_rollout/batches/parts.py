"""Objects that the routes of the batch server share, and what they keep about a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiohttp import web

from sglang_rollout.api.limits_spec import Limits
from sglang_rollout.batches.callers import CallerCheck
from sglang_rollout.batches.client import GenerateClient
from sglang_rollout.batches.held import HeldRequest, HeldRequests
from sglang_rollout.batches.memory import Budget, Share
from sglang_rollout.batches.serving import ServingView


@dataclass(frozen=True)
class Parts:
    """Objects that the routes need."""

    client: GenerateClient
    view: ServingView
    budget: Budget
    limits: Limits
    callers: CallerCheck | None = None
    """None: everyone may send data requests."""
    held: HeldRequests = field(default_factory=HeldRequests)


PARTS = web.AppKey("parts", Parts)
SHARE = web.RequestKey("share", Share)
"""The memory that a request has taken."""
HELD = web.RequestKey("held", HeldRequest)
"""The prompts of a request, which aborts end."""
