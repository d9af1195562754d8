"""Keep a live picture of a few objects: list, watch, list again when the watch breaks. Built on :mod:`kube`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping

from sglang_rollout.kube.client import Kube, WatchEvent
from sglang_rollout.kube.errors import Expired, KubeError
from sglang_rollout.kube.resources import Object, Resource, name_of

# How long to wait before listing again after a failure. The cap bounds how late we notice that the server is back.
FIRST_DELAY = 0.2
LAST_DELAY = 5.0


async def follow(
    kube: Kube,
    resource: Resource,
    namespace: str,
    *,
    name: str | None = None,
    labels: Mapping[str, str | None] | None = None,
    on_error: Callable[[KubeError], None] | None = None,
) -> AsyncIterator[dict[str, Object]]:
    """Yield ``{name: object}`` of all that match: once after the first list, then after every change. Never ends.

    While the API server is away nothing is yielded: the caller keeps what it has, and ``on_error`` hears each failure.
    With ``name`` a field selector is used, which RBAC rules with resourceNames allow.
    """
    fields = {"metadata.name": name} if name is not None else None
    known: dict[str, Object] | None = None
    delay = FIRST_DELAY
    while True:
        try:
            listing = await kube.list(resource, namespace, labels=labels, fields=fields)
            fresh = {name_of(item): item for item in listing.items}
            if fresh != known:
                known = fresh
                yield dict(known)
            version = listing.resource_version
            # The server ends a watch every few minutes: go on from the newest version seen, without a list.
            while True:
                async for event in kube.watch(resource, namespace, resource_version=version, labels=labels, fields=fields):
                    delay = FIRST_DELAY
                    version = event.object["metadata"]["resourceVersion"]
                    if _take(known, event):
                        yield dict(known)
                # A server that shuts down ends each watch at once: that must not become a hot loop.
                await asyncio.sleep(FIRST_DELAY)
        except KubeError as error:
            if on_error is not None and not isinstance(error, Expired):
                on_error(error)
            # Jitter: everybody who lost the same server would come back in the same instant.
            await asyncio.sleep(delay * random.uniform(0.5, 1.5))  # noqa: S311 - no secret
            delay = min(delay * 2, LAST_DELAY)


def _take(known: dict[str, Object], event: WatchEvent) -> bool:
    """Bring ``known`` up to date; says whether anything changed."""
    if event.type == "BOOKMARK":
        return False
    name = name_of(event.object)
    if event.type == "DELETED":
        return known.pop(name, None) is not None
    known[name] = event.object
    return True
