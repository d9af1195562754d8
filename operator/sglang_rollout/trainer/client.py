"""HTTP to the fleet: checked replies, a timeout on every call, sentences on failure."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from urllib.parse import urlsplit

import requests
from urllib3.util.retry import Retry

from sglang_rollout.trainer.cancel import CancellableSession, Cancellation
from sglang_rollout.trainer.errors import FleetError, FleetRefused, FleetUnreachable

CONNECT_SECONDS = 5.0
"""A TCP connection inside a cluster either opens within a few milliseconds or hangs on a dropped packet."""


class Http:
    """A client of one base URL that many threads may use at once."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise FleetError(f"{url!r} is no URL of a fleet. It should look like http://demo-router:30000.")
        self.url = url.rstrip("/")
        self.host: str = parts.hostname
        self.port: int = parts.port or (443 if parts.scheme == "https" else 80)
        self._lock = threading.Lock()
        self._sessions: list[CancellableSession] = []
        self._idle: list[CancellableSession] = []

    def get(self, path: str, *, timeout: float) -> dict[str, Any]:
        """GET a JSON object. Retried on connection errors and 502-504: asking twice changes nothing."""
        return self._checked(path, self.send("GET", path, None, timeout=timeout))

    def post(self, path: str, body: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        """POST a control call and check its reply: HTTP status and, where the reply has one, ``success``. Never
        retried.
        """
        return self._checked(path, self.send("POST", path, body, timeout=timeout))

    def send(
        self, method: str, path: str, body: dict[str, Any] | None, *, timeout: float, cancellation: Cancellation | None = None
    ) -> requests.Response:
        """One HTTP exchange; the caller judges the reply. A cancelled one raises FleetUnreachable at once."""
        connect = min(CONNECT_SECONDS, timeout)
        try:
            with self._session() as session, cancellation.covers(session) if cancellation else nullcontext():
                return session.request(method, self.url + path, json=body, timeout=(connect, timeout))
        except requests.exceptions.Timeout as error:
            raise FleetUnreachable(f"{self.url}{path} did not answer within {timeout:.0f} s.") from error
        except requests.exceptions.RequestException as error:
            raise FleetUnreachable(f"{self.url}{path} could not be reached: {error}") from error

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            for session in self._sessions:
                session.close()

    @contextmanager
    def _session(self) -> Iterator[CancellableSession]:
        """A session for one exchange. As many are made as are ever in use at once: threads come and go with every bucket."""
        with self._lock:
            session = self._idle.pop() if self._idle else self._new_session()
        try:
            yield session
        finally:
            with self._lock:
                self._idle.append(session)

    def _new_session(self) -> CancellableSession:
        retry = Retry(
            total=3,
            backoff_factor=0.2,
            status_forcelist=(502, 503, 504),
            allowed_methods=("GET",),
            raise_on_status=False,
        )
        session = CancellableSession(retry)
        session.trust_env = False  # a cluster-internal URL never goes through the proxy of the user's shell
        self._sessions.append(session)
        return session

    def _checked(self, path: str, response: requests.Response) -> dict[str, Any]:
        reply = json_object(response)
        if not response.ok or reply.get("success") is False:
            fleet = reply.get("fleet")
            details = fleet if isinstance(fleet, dict) else None
            raise FleetRefused(path, response.status_code, refusal(response), details)
        return reply


def json_object(response: requests.Response) -> dict[str, Any]:
    """The reply's JSON object; empty when it is something else (SGLang answers some calls with text)."""
    try:
        value = response.json()
    except requests.exceptions.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def refusal(response: requests.Response) -> str:
    """Why, in the words of whoever answered: the message in the body, else the HTTP reason phrase, else the body's
    start.
    """
    reply = json_object(response)
    error = reply.get("error")
    said = error.get("message") if isinstance(error, dict) else error
    candidates = (reply.get("message"), said, response.reason, response.text[:200])
    return next((str(text).strip() for text in candidates if text), "no reason given")
