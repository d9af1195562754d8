"""Errors of requests to the API server, by what a caller can do about them."""

from __future__ import annotations

from typing import Any

from sglang_rollout.json_text import load_json

_NOT_FOUND = 404
_CONFLICT = 409
_GONE = 410
_TOO_MANY_REQUESTS = 429
_SERVER_ERROR = 500

_STORAGE_ERRORS = ("etcdserver:", "rpc error:")
"""First words of messages in which an API server forwards an error of its storage. Such messages have no reason code."""


class KubeError(Exception):
    """A request failed. ``str()`` is a message for people."""


class NotFound(KubeError):
    """The object does not exist, or its kind is not installed."""


class Conflict(KubeError):
    """Another client was faster: the object exists, has another resourceVersion or UID, or a field has another owner."""


class Expired(KubeError):
    """The resourceVersion of a watch or of a list page is too old: list again."""


class Refused(KubeError):
    """The server refused the request because of the schema, CEL, a quota, RBAC or a webhook. A retry alone does not help."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


class ApiUnavailable(KubeError):
    """There is no usable answer: no connection, deadline exceeded, 429, or 5xx that is not a refusal. Try again later."""

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NoCredentials(KubeError):
    """There is no kubeconfig outside a cluster, or the kubeconfig cannot be used."""


def error_from_status(what: str, code: int, body: bytes | str, *, retry_after: str | None = None, is_read: bool = False) -> KubeError:
    """Return the error for a failed HTTP reply.

    Args:
        what: The request, for the message: ``get configmaps ns/name``.
        code: HTTP status.
        body: Body of the reply.
        retry_after: Header ``Retry-After``.
        is_read: True if the request sent no object. To a write, an API server answers 500 also if the object does not fit the
            schema or a webhook cannot be called.
    """
    status = _parse_status(body)
    message = f"{what}: {str(status.get('message') or '').strip() or f'HTTP {code}'}"
    if code == _NOT_FOUND:
        return NotFound(message)
    if code == _CONFLICT:
        return Conflict(message)
    if code == _GONE:
        return Expired(message)
    if code == _TOO_MANY_REQUESTS or (code >= _SERVER_ERROR and (is_read or not _is_refusal(code, status))):
        return ApiUnavailable(message, retry_after=_parse_seconds(retry_after))
    return Refused(message, code=code)


def _is_refusal(code: int, status: dict[str, Any]) -> bool:
    """Return True if a healthy API server has refused, and not a proxy or an API server without its storage."""
    message = str(status.get("message") or "").removeprefix("Internal error occurred: ")
    return code == _SERVER_ERROR and status.get("kind") == "Status" and not message.startswith(_STORAGE_ERRORS)


def _parse_status(body: bytes | str) -> dict[str, Any]:
    """Return the ``kind: Status`` of an error reply; empty for other replies, such as a proxy's HTML."""
    try:
        parsed = load_json(body)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _parse_seconds(value: str | None) -> float | None:
    """Return Retry-After in seconds. Kubernetes does not send its HTTP-date form."""
    return float(value) if value is not None and value.isdigit() else None
