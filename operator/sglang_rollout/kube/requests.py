"""Requests to the API server as data: what is asked, and the words for it. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp

from sglang_rollout.kube.resources import Object, Resource, describe, selector


@dataclass(frozen=True)
class Call:
    """One request, and the words for it: ``verb`` for metrics, ``what`` for messages."""

    verb: str
    what: str
    method: str
    path: str
    plural: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    body: Object | str | None = None
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
    body: Object | str | None = None,
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


_NOT_IN_YAML = re.compile("[\x7f-\x9f\ud800-\udfff\ufeff\ufffe\uffff]")


def as_yaml(obj: Object) -> str:
    """Return ``obj`` as JSON that is YAML too. Server-side apply is read as YAML, which has no surrogate pairs and refuses some
    characters unless they are escaped; half a pair, which is no character, becomes U+FFFD."""

    def escaped(found: re.Match[str]) -> str:
        code = ord(found.group())
        return "\\ufffd" if 0xD800 <= code <= 0xDFFF else f"\\u{code:04x}"

    return _NOT_IN_YAML.sub(escaped, json.dumps(obj, ensure_ascii=False))
