"""What a custom resource means: all child objects, in the order in which they are applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render.common import Settings
from sglang_rollout.controller.render.engines import engine_statefulsets
from sglang_rollout.controller.render.fleet_objects import control_secret, intent, rbac, services, weights
from sglang_rollout.controller.render.placement import pod_groups
from sglang_rollout.controller.render.prefetch import prefetch
from sglang_rollout.controller.render.router import router_deployment

__all__ = ["render_all"]


def render_all(
    rollout: SGLangRollout,
    settings: Settings,
    token: str | None = None,
    *,
    gates: Mapping[str, int] | None = None,
    avoided: Sequence[str] = (),
    members: int | None = None,
) -> list[dict[str, Any]]:
    """Return every child object of ``rollout``, those that others need first.

    ``token`` is what the Secret holds already; without it the Secret is rendered empty, and whoever applies it puts a
    token in. ``gates``: ports of gates that are there, by engine; others are where they are wanted. ``avoided``: the nodes that engines
    are kept off. ``members``: how many pods the group of the base has now, if not all that it is to have.
    """
    return [
        *rbac(rollout),
        control_secret(rollout, token),
        intent(rollout, gates or {}),
        weights(rollout),
        *services(rollout),
        router_deployment(rollout, settings),
        *prefetch(rollout, settings),
        *pod_groups(rollout, members),
        *engine_statefulsets(rollout, settings, avoided),
    ]
