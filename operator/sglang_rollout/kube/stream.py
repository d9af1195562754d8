"""What a LIST and a WATCH return, and how a watch's bytes become events. Opens no connection."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal

from sglang_rollout.kube.errors import ApiUnavailable, Expired, from_status
from sglang_rollout.kube.resources import Object


@dataclass(frozen=True)
class Listing:
    """A LIST: the objects and the resourceVersion from which a watch misses nothing."""

    items: list[Object]
    resource_version: str


@dataclass(frozen=True)
class WatchEvent:
    """One line of a watch. BOOKMARK carries nothing but a newer resourceVersion."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    object: Object


def parse_object(what: str, data: bytes) -> Object:
    """JSON object from a reply; anything else means that something in between answered, not an API server."""
    try:
        parsed = json.loads(data)
    except ValueError as error:
        raise ApiUnavailable(f"{what}: the answer is no JSON: is this the address of a Kubernetes API server?") from error
    if not isinstance(parsed, dict):
        raise ApiUnavailable(f"{what}: the answer is no JSON object: is this the address of a Kubernetes API server?")
    return parsed


async def lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines of any length; aiohttp's own line reader gives up at its buffer size."""
    pending = b""
    async for chunk in chunks:
        *whole, pending = (pending + chunk).split(b"\n")
        for line in whole:
            if line.strip():
                yield line


def parse_event(what: str, line: bytes) -> WatchEvent:
    """One line of a watch; the server's ERROR event becomes an exception."""
    parsed = parse_object(what, line)
    kind, obj = parsed["type"], parsed["object"]
    if kind == "ERROR":
        error = from_status(what, int(obj.get("code") or 500), json.dumps(obj), read=True)
        # Whatever the server says, a watch that failed goes on with a new list.
        raise error if isinstance(error, Expired | ApiUnavailable) else Expired(str(error))
    return WatchEvent(kind, obj)
