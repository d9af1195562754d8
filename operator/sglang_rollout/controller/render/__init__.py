"""Render a rollout: all child objects, in the order in which they are applied. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render.common import Settings
from sglang_rollout.controller.render.engines import engine_statefulsets
from sglang_rollout.controller.render.fleet_objects import control_secret, credentials_secret, intent, rbac, services, weights
from sglang_rollout.controller.render.network_policies import network_policies
from sglang_rollout.controller.render.placement import pod_groups
from sglang_rollout.controller.render.router import router_deployment
from sglang_rollout.controller.render.store import store_objects

__all__ = ["render_all"]


def render_all(
    rollout: SGLangRollout,
    settings: Settings,
    token: str | None = None,
    *,
    gates: Mapping[str, int] | None = None,
    avoided: Sequence[str] = (),
    members: int | None = None,
    is_store_protected: bool = False,
) -> list[dict[str, Any]]:
    """Return every child object of a rollout. Objects that other objects need come first.

    Args:
        rollout: The rollout.
        settings: Settings of the operator.
        token: Key that its Secret already holds. Without it that Secret is rendered empty, and the Secret of the credentials is left out.
        gates: Ports of existing gates, by engine. Other gates are where the spec puts them.
        avoided: Nodes that engines keep off.
        members: Present number of pods in the PodGroup of the base. None: the number that the spec asks for.
        is_store_protected: True if a drain must wait for the weight store.
    """
    return [
        *rbac(rollout),
        control_secret(rollout, token),
        *credentials_secret(rollout, token),
        intent(rollout, gates or {}),
        weights(rollout),
        *network_policies(rollout),
        *services(rollout),
        *store_objects(rollout, settings, is_protected=is_store_protected),
        router_deployment(rollout, settings),
        *pod_groups(rollout, members),
        *engine_statefulsets(rollout, settings, avoided),
    ]
