"""Post Kubernetes Events about rollouts, which people read with ``kubectl describe``.

Each kind of Event is one object with a stable name. Repeated Events increase its count instead of filling etcd. Core/v1 Events are
used because their message may change; in events.k8s.io/v1 only the count may. The API server stores both as the same object.
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

MAX_MESSAGE_CHARACTERS = 1024
"""The API server refuses longer messages."""
MAX_REMEMBERED_COUNTS = 2000
"""Events whose count is kept in memory. The count of any other Event is read from the API server."""


class EventPoster:
    """Posts Events about rollouts. Never raises, because a failed Event must not fail a reconcile."""

    def __init__(self, kube: Kube, *, component: str, instance: str, now: Callable[[], str]) -> None:
        self._kube = kube
        self._component = component
        self._instance = instance
        self._now = now
        self._counts: OrderedDict[tuple[str, str], int] = OrderedDict()

    async def post(self, rollout: Object, event: EventToPost) -> None:
        """Create the Event, or increase its count and replace its message."""
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
                # The operator posted this Event before its last restart.
                found = await self._kube.get(EVENTS, *key)
                count = int(found.get("count") or 1)
            else:
                self._remember(key, 1)
                return
        changes = {name: obj[name] for name in ("type", "reason", "message", "lastTimestamp")}
        try:
            await self._kube.merge_patch(EVENTS, *key, {**changes, "count": count + 1})
        except NotFound:
            # The API server deletes an Event after an hour.
            await self._kube.create(obj)
            count = 0
        self._remember(key, count + 1)

    def _remember(self, key: tuple[str, str], count: int) -> None:
        self._counts[key] = count
        self._counts.move_to_end(key)
        while len(self._counts) > MAX_REMEMBERED_COUNTS:
            self._counts.popitem(last=False)

    def _render(self, rollout: Object, event: EventToPost) -> Object:
        metadata = rollout["metadata"]
        # The uid is part of the name, so that a recreated rollout of the same name has its own Events.
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
            "message": event.message[:MAX_MESSAGE_CHARACTERS],
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
            "source": {"component": self._component},
            "reportingComponent": self._component,
            "reportingInstance": self._instance,
        }
