"""Kubernetes Events of a rollout: what a person reads in ``kubectl describe``.

Each kind of news has one Event object with a stable name: repeated news count it up instead of filling etcd. Core/v1
Events are used because their message may change; those of events.k8s.io/v1 are immutable but for their count, and both
are one object in the server.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable

from sglang_rollout.controller.decide.transitions import EventToPost
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import Conflict, KubeError, NotFound
from sglang_rollout.kube.resources import EVENTS, Object

log = logging.getLogger(__name__)

# The server refuses longer messages.
MESSAGE_LIMIT = 1024
# How many Events we remember the count of; what falls out is read from the server again.
REMEMBERED = 2000


class EventPoster:
    """Posts Events about rollouts. Never raises: an Event that cannot be written must not hold up a reconcile."""

    def __init__(self, kube: Kube, *, component: str, instance: str, now: Callable[[], str]) -> None:
        self._kube = kube
        self._component = component
        self._instance = instance
        self._now = now
        self._counts: OrderedDict[tuple[str, str], int] = OrderedDict()

    async def post(self, rollout: Object, event: EventToPost) -> None:
        """Create the Event, or count it up and give it the new message."""
        try:
            await self._post(rollout, event)
        except KubeError as error:
            log.warning("an Event could not be written: %s", error)

    async def _post(self, rollout: Object, event: EventToPost) -> None:
        obj = self._render(rollout, event)
        key = (obj["metadata"]["namespace"], obj["metadata"]["name"])
        count = self._counts.get(key)
        if count is None:
            try:
                await self._kube.create(obj)
            except Conflict:
                # An earlier life of the operator has posted it.
                found = await self._kube.get(EVENTS, *key)
                count = int(found.get("count") or 1)
            else:
                self._remember(key, 1)
                return
        news = {name: obj[name] for name in ("type", "reason", "message", "lastTimestamp")}
        try:
            await self._kube.merge_patch(EVENTS, *key, {**news, "count": count + 1})
        except NotFound:
            # Events live for an hour; this one has ended since we counted it last.
            await self._kube.create(obj)
            count = 0
        self._remember(key, count + 1)

    def _remember(self, key: tuple[str, str], count: int) -> None:
        self._counts[key] = count
        self._counts.move_to_end(key)
        while len(self._counts) > REMEMBERED:
            self._counts.popitem(last=False)

    def _render(self, rollout: Object, event: EventToPost) -> Object:
        metadata = rollout["metadata"]
        # The uid is part of the name: a rollout made anew under the same name has news of its own.
        digest = hashlib.sha256(f"{metadata['uid']}/{event.key}".encode()).hexdigest()[:16]
        now = self._now()
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{metadata['name']}.{digest}", "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": rollout["apiVersion"],
                "kind": rollout["kind"],
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "type": event.type,
            "reason": event.reason,
            "message": event.message[:MESSAGE_LIMIT],
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
            "source": {"component": self._component},
            "reportingComponent": self._component,
            "reportingInstance": self._instance,
        }
