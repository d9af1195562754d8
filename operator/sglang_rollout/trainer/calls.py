"""Calls with deadlines: HTTP calls to the fleet that other threads can cancel, and functions in background threads.

``requests`` cannot cancel a call. The sessions of this module keep a weak reference to each socket that they open, and
``cancel`` shuts these sockets down, so that the fleet aborts what it generates for them.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit
from weakref import WeakSet

import requests
import urllib3.exceptions
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.util.retry import Retry

from sglang_rollout.keepalive import CLIENT_OPTIONS
from sglang_rollout.trainer.credentials import Credentials
from sglang_rollout.trainer.errors import FleetError, FleetRefused, FleetUnreachable, FleetUntrusted
from sglang_rollout.trainer.forks import keep_forever, renew_after_fork
from sglang_rollout.trainer.refusals import parse_object, read_reason
from sglang_rollout.wire.reasons import end_sentence

P = ParamSpec("P")
R = TypeVar("R")

CONNECT_SECONDS = 5.0
"""A TCP connection inside a cluster either opens within a few milliseconds or hangs on a dropped packet."""
_MAX_NESTING = 8
"""Errors inside each other that are searched for the first one."""
MAX_ANSWER_BYTES = 2**30
"""Most bytes of an answer: 256 samples of 30,000 tokens with their log-probabilities, about 100 bytes for a token."""
PART_BYTES = 256 << 10
"""Bytes that a connection gets at a time."""


class Deadline:
    """A point in time that several waits share."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    @property
    def has_passed(self) -> bool:
        """True if no time is left."""
        return self.remaining <= 0.0


def run_in_background(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
    """Run ``function`` in a daemon thread and return a future of its result.

    A ``ThreadPoolExecutor`` would block the exit of the interpreter: its threads are joined at exit, and a thread inside
    a collective whose peers are gone may never return.
    """
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - the future raises the error again in the waiting thread
            future.set_exception(error)

    threading.Thread(target=run, name=f"rollout-{getattr(function, '__name__', 'call')}", daemon=True).start()
    return future


class Http:
    """A client of one base URL, safe to use from many threads at once."""

    def __init__(self, url: str, credentials: Credentials | None = None, *, retries: int = 3) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise FleetError(f"{url!r} is not the URL of a fleet. A fleet's URL looks like http://demo-router:30000.")
        self.url = url.rstrip("/")
        self.host: str = parts.hostname
        self.port: int = parts.port or (443 if parts.scheme == "https" else 80)
        self._credentials = credentials or Credentials()
        self._retries = retries
        self._lock = threading.Lock()
        self._sessions: list[CancellableSession] = []
        self._idle: list[CancellableSession] = []
        renew_after_fork(self)

    def renew(self) -> None:
        """Close the connections of the parent process in this forked child, and begin without any."""
        for session in self._sessions:
            session.close_copies()
        keep_forever(self._sessions)
        self._lock, self._sessions, self._idle = threading.Lock(), [], []

    def without_retries(self) -> Http:
        """Return a client of the same URL that makes each call once."""
        return Http(self.url, self._credentials, retries=0)

    def get(self, path: str, *, timeout: float, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return the JSON object at ``path``. Retry connection errors and 502 to 504, because a GET changes nothing."""
        return self._checked_reply(path, self.send("GET", path, None, timeout=timeout, headers=headers))

    def post(self, path: str, body: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        """POST a control call and check its reply: the HTTP status, and ``success`` if the reply has it. Never retry."""
        return self._checked_reply(path, self.send("POST", path, body, timeout=timeout))

    def put(
        self, path: str, data: memoryview, *, headers: Mapping[str, str], timeout: float, cancellation: Cancellation | None = None
    ) -> dict[str, Any]:
        """PUT bytes and check the reply as ``post`` does. Never retry.

        A slow connection may take as long as it needs: ``timeout`` is that of each part of the bytes, and of the answer.
        """
        reply = self.send("PUT", path, None, timeout=timeout, cancellation=cancellation, data=_Parts(data), headers=headers)
        return self._checked_reply(path, reply)

    def delete(self, path: str, *, timeout: float) -> dict[str, Any]:
        """DELETE a resource and check the reply as ``post`` does. Never retry."""
        return self._checked_reply(path, self.send("DELETE", path, None, timeout=timeout))

    def send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        *,
        timeout: float,
        cancellation: Cancellation | None = None,
        data: _Parts | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> requests.Response:
        """Make one HTTP call and return its response, whatever the status is.

        Args:
            method: ``GET``, ``POST``, ``PUT`` or ``DELETE``.
            path: Path, with the query.
            body: JSON object to send.
            timeout: Seconds until the answer begins, and until the other side takes the next part of ``data``.
            cancellation: Switch that ends the call.
            data: Bytes to send in place of ``body``.
            headers: Headers beside the credentials.

        Raises:
            FleetUnreachable: The URL did not answer in time, or the call was cancelled.
            FleetUntrusted: The certificate of the URL was not accepted.
            FleetError: The file of the token cannot be read.
        """
        # Also the timeout of sending each part of the data on a new connection.
        connect = timeout if data is not None else min(CONNECT_SECONDS, timeout)
        try:
            with self._session() as session, cancellation.attach(session) if cancellation else nullcontext():
                sent = {**(headers or {}), **self._credentials.headers()}
                payload: Any = data  # requests sends whatever has a length and yields buffers
                url, limit = self.url + path, (connect, timeout)
                response = session.request(method, url, json=body, data=payload, headers=sent, timeout=limit, stream=True)
                return read_body(response, path)
        except requests.exceptions.Timeout as error:
            raise FleetUnreachable(f"{self.url}{path} did not answer within {timeout:.0f} s.") from error
        except requests.exceptions.RequestException as error:
            if refused := _certificate_error(error):
                raise FleetUntrusted(self._distrust(refused)) from error
            raise FleetUnreachable(f"{self.url}{path} could not be reached: {_innermost_reason(error)}.") from error

    def _distrust(self, error: ssl.SSLCertVerificationError) -> str:
        """Return why the certificate was not accepted, and what to change."""
        asked = self._credentials.ca
        authorities = f"the authorities in {asked}" if asked is not None else "the public authorities of the package certifi"
        return (
            f"The certificate of {self.url} is not accepted: {end_sentence(error.verify_message)} It was checked against {authorities}."
            " Name the file with its authority as connect(ca=...), or in the variable SGLANG_ROLLOUT_CA, and use a host name that the"
            " certificate contains."
        )

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            for session in self._sessions:
                session.close()

    @contextmanager
    def _session(self) -> Iterator[CancellableSession]:
        """Yield a session for one call. Sessions are pooled, because each bucket of a push starts new threads."""
        with self._lock:
            session = self._idle.pop() if self._idle else self._new_session()
        try:
            yield session
        finally:
            with self._lock:
                self._idle.append(session)

    def _new_session(self) -> CancellableSession:
        retry = Retry(
            total=self._retries,
            read=None if self._retries else False,  # False: a timeout is raised as it is
            backoff_factor=0.2,
            status_forcelist=(502, 503, 504),
            allowed_methods=("GET",),
            raise_on_status=False,
        )
        session = CancellableSession(retry)
        session.headers["Accept-Encoding"] = "identity"
        session.trust_env = False  # a cluster-internal URL never goes through the proxy of the user's shell
        if self._credentials.ca is not None:
            session.verify = self._credentials.ca
        self._sessions.append(session)
        return session

    def _checked_reply(self, path: str, response: requests.Response) -> dict[str, Any]:
        reply = parse_object(response)
        if not response.ok or reply.get("success") is False:
            fleet = reply.get("fleet")
            details = fleet if isinstance(fleet, dict) else None
            reason = read_reason(response)
            raise FleetRefused(path, response.status_code, reason.message, details, code=reason.code)
        return reply


def _innermost_reason(error: requests.exceptions.RequestException) -> str:
    """Return what the operating system says about a failed call, such as ``Connection refused``; else the text of requests."""
    found: BaseException | None = error
    for _ in range(_MAX_NESTING):
        if isinstance(found, OSError) and not isinstance(found, requests.exceptions.RequestException):
            return (found.strerror or str(found)).rstrip(".")
        inner = [found.__cause__, getattr(found, "reason", None), *found.args] if found is not None else []
        found = next((each for each in inner if isinstance(each, BaseException)), None)
    return str(error).rstrip(".")


def _certificate_error(error: requests.exceptions.RequestException) -> ssl.SSLCertVerificationError | None:
    """Return why the certificate of the other side was not accepted; None if the call failed for another reason."""
    reason = getattr(error.args[0], "reason", None) if error.args else None  # of urllib3's MaxRetryError
    cause = reason.args[0] if isinstance(reason, urllib3.exceptions.SSLError) and reason.args else None
    return cause if isinstance(cause, ssl.SSLCertVerificationError) else None


def read_body(response: requests.Response, path: str) -> requests.Response:
    """Read the body of an answer, and return the answer.

    Raises:
        FleetError: The body is too large or compressed.
    """
    encoding = response.headers.get("Content-Encoding", "identity")
    parts: list[bytes] = []
    size = 0
    if encoding.lower() == "identity":
        for part in response.iter_content(PART_BYTES):
            parts.append(part)
            size += len(part)
            if size > MAX_ANSWER_BYTES:
                break
    if encoding.lower() != "identity" or size > MAX_ANSWER_BYTES:
        response.close()
        what = f"has more than {MAX_ANSWER_BYTES >> 20} MiB" if size else f"is compressed ({encoding[:20]})"
        raise FleetError(f"The answer to {path} {what}, so it is not read.")
    response._content = b"".join(parts)  # what requests sets itself if it reads the body
    return response


class CancellableSession(requests.Session):
    """A session for one call at a time, which another thread may cancel."""

    def __init__(self, retry: Retry) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._cancelled = False
        for scheme in ("http://", "https://"):
            self.mount(scheme, _TrackingAdapter(self._check_cancelled, self._track_socket, max_retries=retry))

    def cancel(self) -> None:
        """Shut down all open sockets, and refuse new ones until ``reset``."""
        with self._lock:
            self._cancelled = True
            for each in self._sockets:
                with suppress(OSError):  # the peer or the session's own thread closed the socket first
                    # The method of the plain socket: that of an SSLSocket changes state which the reading thread uses.
                    socket.socket.shutdown(each, socket.SHUT_RDWR)

    def reset(self) -> None:
        """Make the session usable after ``cancel``."""
        with self._lock:
            self._cancelled = False

    def close_copies(self) -> None:
        """Close the sockets in a forked child. The connections of its parent stay open."""
        for each in list(self._sockets):
            descriptor = socket.socket.detach(each)  # takes no lock, which a thread of the parent may have held
            if descriptor >= 0:
                os.close(descriptor)

    def _check_cancelled(self) -> None:
        if self._cancelled:
            raise ConnectionAbortedError("the call was cancelled")  # urllib3 does not retry a POST after this error

    def _track_socket(self, opened: socket.socket) -> None:
        with self._lock:
            self._sockets.add(opened)
            self._check_cancelled()


class Cancellation:
    """One switch for many calls: ``cancel`` ends the running calls, and later calls end at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._sessions: set[CancellableSession] = set()

    @property
    def is_requested(self) -> bool:
        """True after ``cancel``."""
        return self._event.is_set()

    def cancel(self) -> None:
        """End all calls now. Safe to repeat."""
        with self._lock:
            self._event.set()
            for session in self._sessions:
                session.cancel()

    def wait(self, seconds: float) -> bool:
        """Sleep for ``seconds``, or until ``cancel``. Return True if ``cancel`` was called."""
        return self._event.wait(seconds)

    @contextmanager
    def attach(self, session: CancellableSession) -> Iterator[None]:
        """Let this switch cancel the calls of ``session`` inside the block."""
        with self._lock:
            self._sessions.add(session)
            if self.is_requested:
                session.cancel()
        try:
            yield
        finally:
            # Under the lock, because a later cancel must not reach the next user of the session.
            with self._lock:
                self._sessions.discard(session)
                session.reset()


@dataclass(frozen=True, slots=True)
class _Parts:
    """Bytes that are sent part by part, because a socket's timeout is that of all bytes that it gets at once."""

    data: memoryview

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[memoryview]:
        return (self.data[start : start + PART_BYTES] for start in range(0, len(self.data), PART_BYTES))


class _TrackingAdapter(HTTPAdapter):
    """Report each new socket to the session, and check for a cancellation before a socket is opened."""

    def __init__(self, before: Callable[[], None], after: Callable[[socket.socket], None], **options: Any) -> None:
        self._pools = _tracking_pools(before, after)
        super().__init__(**options)

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        super().init_poolmanager(*args, socket_options=[*HTTPConnection.default_socket_options, *CLIENT_OPTIONS], **options)
        self.poolmanager.pool_classes_by_scheme = self._pools


def _tracking_pools(before: Callable[[], None], after: Callable[[socket.socket], None]) -> dict[str, type[HTTPConnectionPool]]:
    class Plain(HTTPConnection):
        def connect(self) -> None:
            before()
            super().connect()
            after(self.sock)

    class Secure(HTTPSConnection):
        def connect(self) -> None:
            before()
            super().connect()
            after(self.sock)

    class PlainPool(HTTPConnectionPool):
        ConnectionCls = Plain

    class SecurePool(HTTPSConnectionPool):
        ConnectionCls = Secure

    return {"http": PlainPool, "https": SecurePool}
