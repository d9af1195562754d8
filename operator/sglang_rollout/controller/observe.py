"""Read what a decision rests on: the rollout and all objects that carry its label, live, never from a cache."""

from __future__ import annotations

import asyncio

from sglang_rollout.controller.decide.view import World, observe_world
from sglang_rollout.controller.prerequisites import with_cluster
from sglang_rollout.controller.render.names import CHILD_KINDS, LABEL_ROLLOUT
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import NotFound
from sglang_rollout.kube.resources import PODS, ROLLOUTS, Object, Resource

CHILDREN = tuple(Resource.of(kind.api_version, kind.kind, kind.plural) for kind in CHILD_KINDS)
"""The kinds that a rollout renders to: listed here, watched in :mod:`triggers`, pruned by the plan."""


async def observe(kube: Kube, namespace: str, name: str) -> World | None:
    """The world of one rollout; None when the rollout is gone."""
    labels: dict[str, str | None] = {LABEL_ROLLOUT: name}
    try:
        rollout = await kube.get(ROLLOUTS, namespace, name)
    except NotFound:
        return None
    # The rollout is read first: children that are newer than it do no harm, a rollout newer than its children would
    # make us plan with objects that somebody (we, a moment ago) has already replaced.
    listings = await asyncio.gather(*(kube.list(resource, namespace, labels=labels) for resource in (*CHILDREN, PODS)))
    pods = listings[-1].items
    children: list[Object] = [item for listing in listings[:-1] for item in listing.items]
    return await with_cluster(kube, observe_world(rollout, children, pods))
