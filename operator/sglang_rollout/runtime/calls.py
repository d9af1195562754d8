"""Requests to the API server as data: what is asked, and the words for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp

from sglang_rollout.runtime.resources import Object, Resource, describe, selector


@dataclass(frozen=True)
class Call:
    """One request, and the words for it: ``verb`` for metrics, ``what`` for messages."""

    verb: str
    what: str
    method: str
    path: str
    plural: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    body: Object | None = None
    content_type: str = "application/json"
    limit: aiohttp.ClientTimeout | None = None
    """None: the connection's deadline."""


def call_of(
    verb: str,
    method: str,
    resource: Resource,
    namespace: str | None,
    name: str | None = None,
    *,
    subresource: str | None = None,
    query: Mapping[str, str] | None = None,
    body: Object | None = None,
    content_type: str = "application/json",
    limit: aiohttp.ClientTimeout | None = None,
) -> Call:
    """A request about objects of a resource."""
    return Call(
        verb=verb,
        what=f"{verb} {describe(resource, namespace, name)}",
        method=method,
        path=resource.path(namespace, name, subresource),
        plural=resource.plural,
        query=dict(query or {}),
        body=body,
        content_type=content_type,
        limit=limit,
    )


def selectors(labels: Mapping[str, str | None] | None, fields: Mapping[str, str] | None) -> dict[str, str]:
    """Query parameters that select objects by labels and fields."""
    query = {}
    if labels:
        query["labelSelector"] = selector(labels)
    if fields:
        query["fieldSelector"] = selector(fields)
    return query
