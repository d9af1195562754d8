"""What can go wrong between us and a Kubernetes API server, in five words that callers can act on."""

from __future__ import annotations

import json
from typing import Any

STATUS_CONFLICT = 409
STATUS_EXPIRED = 410
STATUS_NOT_FOUND = 404
STATUS_TOO_MANY = 429
STATUS_SERVER_ERROR = 500

_STORAGE = ("etcdserver:", "rpc error:")
"""How the words of an API server begin whose storage is away: it passes them on as errors of its own."""


class KubeError(Exception):
    """Any failed conversation with the API server. ``str()`` of it is a sentence for people."""


class NotFound(KubeError):
    """The object does not exist, or its kind is not installed."""


class Conflict(KubeError):
    """Somebody was faster: the object exists, has another resourceVersion or uid, or a field has another owner."""

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason

    @property
    def already_exists(self) -> bool:
        """Whether a create met an object of the same name."""
        return self.reason == "AlreadyExists"


class Expired(KubeError):
    """The resourceVersion of a watch or a list page is too old: list again."""


class Refused(KubeError):
    """The server understood and said no (schema, CEL, quota, RBAC, a webhook). Trying the same again does not help by itself."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


class ApiUnavailable(KubeError):
    """No usable answer: connection refused or lost, deadline passed, 429, 5xx but for refusals. Trying again later is right."""

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NoCredentials(KubeError):
    """No kubeconfig and not in a cluster, or a kubeconfig that cannot be used."""


def from_status(what: str, code: int, body: bytes | str, *, retry_after: str | None = None, read: bool = False) -> KubeError:
    """Turn a failed HTTP reply into one of the errors above; ``what`` says what was tried (``get configmaps ns/x``).

    ``read``: nothing was sent that could be refused. To a server-side apply that does not fit the schema, and when a webhook cannot be
    called, an API server answers 500, too.
    """
    status = _status_object(body)
    sentence = str(status.get("message") or "").strip() or f"HTTP {code}"
    reason = str(status.get("reason") or "")
    message = f"{what}: {sentence}"
    if code == STATUS_NOT_FOUND:
        return NotFound(message)
    if code == STATUS_CONFLICT:
        return Conflict(message, reason=reason)
    if code == STATUS_EXPIRED:
        return Expired(message)
    if code == STATUS_TOO_MANY or (code >= STATUS_SERVER_ERROR and (read or not _is_refusal(code, status))):
        return ApiUnavailable(message, retry_after=_seconds(retry_after))
    return Refused(message, code=code)


def _is_refusal(code: int, status: dict[str, Any]) -> bool:
    """Whether a server that works as it should has said no, and neither something in between nor one without its storage."""
    said = str(status.get("message") or "").removeprefix("Internal error occurred: ")
    return code == STATUS_SERVER_ERROR and status.get("kind") == "Status" and not said.startswith(_STORAGE)


def _status_object(body: bytes | str) -> dict[str, Any]:
    """The ``kind: Status`` of an error reply; proxies in between answer with HTML, which tells nothing."""
    try:
        parsed = json.loads(body)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _seconds(value: str | None) -> float | None:
    """Retry-After in seconds; the HTTP-date form is not used by Kubernetes."""
    return float(value) if value is not None and value.isdigit() else None
