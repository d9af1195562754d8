"""Follow a set of objects: list, watch, and list again when the watch fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping

from sglang_rollout.kube.client import Kube, Listing, WatchEvent
from sglang_rollout.kube.errors import Expired, KubeError
from sglang_rollout.kube.resources import Object, Resource, name_of

FIRST_DELAY_SECONDS = 0.2
"""Delay before the next list after a failure; it doubles with each failure."""
LAST_DELAY_SECONDS = 5.0
"""Longest delay before the next list, and so before a client notices that the server is back."""


async def follow(
    kube: Kube,
    resource: Resource,
    namespace: str,
    *,
    name: str | None = None,
    labels: Mapping[str, str | None] | None = None,
    on_error: Callable[[KubeError], None] | None = None,
) -> AsyncIterator[dict[str, Object]]:
    """Yield all objects that match, by name: after the first list, then after every change. Never ends.

    Nothing is yielded while the API server is away.

    Args:
        kube: Client of the API server.
        resource: The kind of object.
        namespace: Namespace of the objects.
        name: Follow only this object. The name becomes a field selector, which RBAC rules with resourceNames allow.
        labels: Labels that objects must have.
        on_error: Called with each failure.
    """
    known: dict[str, Object] | None = None
    async for change in follow_changes(kube, resource, namespace, name=name, labels=labels, on_error=on_error):
        if isinstance(change, Listing):
            fresh = {name_of(item): item for item in change.items}
            if fresh != known:
                known = fresh
                yield dict(known)
        elif known is not None and _update(known, change):
            yield dict(known)


async def follow_changes(
    kube: Kube,
    resource: Resource,
    namespace: str | None,
    *,
    name: str | None = None,
    labels: Mapping[str, str | None] | None = None,
    on_error: Callable[[KubeError], None] | None = None,
) -> AsyncIterator[Listing | WatchEvent]:
    """Yield each list of the objects, and each event after it. Never ends. The arguments are those of :func:`follow`.

    A list replaces all that is known. It comes first, and after every failure of the watch. ``namespace`` None: all namespaces.
    """
    fields = {"metadata.name": name} if name is not None else None
    delay = FIRST_DELAY_SECONDS
    while True:
        try:
            listing = await kube.list(resource, namespace, labels=labels, fields=fields)
            yield listing
            version = listing.resource_version
            # The server ends a watch every few minutes. The next watch starts at the newest version, without a list.
            while True:
                async for event in kube.watch(resource, namespace, resource_version=version, labels=labels, fields=fields):
                    delay = FIRST_DELAY_SECONDS
                    version = event.object["metadata"]["resourceVersion"]
                    yield event
                # A server that shuts down ends each watch immediately, which must not become a busy loop.
                await asyncio.sleep(FIRST_DELAY_SECONDS)
        except KubeError as error:
            if on_error is not None and not isinstance(error, Expired):
                on_error(error)
            # Jitter, because all clients of the server lose it at the same moment.
            await asyncio.sleep(delay * random.uniform(0.5, 1.5))  # noqa: S311 - no secret
            delay = min(delay * 2, LAST_DELAY_SECONDS)


def _update(known: dict[str, Object], event: WatchEvent) -> bool:
    """Update ``known`` by an event. Return True if it changed."""
    if event.type == "BOOKMARK":
        return False
    name = name_of(event.object)
    if event.type == "DELETED":
        return known.pop(name, None) is not None
    known[name] = event.object
    return True
