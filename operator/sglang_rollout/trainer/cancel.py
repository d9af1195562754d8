"""Cancel HTTP calls of other threads: shut their sockets, so that the fleet aborts what it generates for them.

``requests`` has no such call. Sessions of this module keep a weak reference to each socket that they open.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.util.retry import Retry

Check = Callable[[], None]
Watch = Callable[[socket.socket], None]


class CancellableSession(requests.Session):
    """A session for one call at a time, which another thread may cancel."""

    def __init__(self, retry: Retry) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._cancelled = False
        for scheme in ("http://", "https://"):
            self.mount(scheme, _WatchedAdapter(self._check, self._watch, max_retries=retry))

    def cancel(self) -> None:
        """Shut all sockets of this session and refuse new ones until ``reset``."""
        with self._lock:
            self._cancelled = True
            for each in self._sockets:
                with suppress(OSError):  # the peer or the session's own thread closed it first
                    # The method of the plain socket: that of an SSLSocket changes state which the reading thread uses.
                    socket.socket.shutdown(each, socket.SHUT_RDWR)

    def reset(self) -> None:
        """Make the session usable after ``cancel``."""
        with self._lock:
            self._cancelled = False

    def _check(self) -> None:
        if self._cancelled:
            raise ConnectionAbortedError("the call was cancelled")  # urllib3 does not retry a POST after this error

    def _watch(self, opened: socket.socket) -> None:
        with self._lock:
            self._sockets.add(opened)
            self._check()


class Cancellation:
    """One switch for many calls: ``cancel`` ends those that run, and those that begin later end at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._sessions: set[CancellableSession] = set()

    @property
    def requested(self) -> bool:
        """Whether ``cancel`` was called."""
        return self._event.is_set()

    def cancel(self) -> None:
        """End all calls now. Safe to repeat."""
        with self._lock:
            self._event.set()
            for session in self._sessions:
                session.cancel()

    def wait(self, seconds: float) -> bool:
        """Sleep for ``seconds``, or until ``cancel``. Return whether it was called."""
        return self._event.wait(seconds)

    @contextmanager
    def covers(self, session: CancellableSession) -> Iterator[None]:
        """Make the calls of ``session`` inside the block subject to this switch."""
        with self._lock:
            self._sessions.add(session)
            if self.requested:
                session.cancel()
        try:
            yield
        finally:
            # Under the lock, because a cancel that comes later must not reach the session's next user.
            with self._lock:
                self._sessions.discard(session)
                session.reset()


class _WatchedAdapter(HTTPAdapter):
    """Reports each new socket of its connections, and asks before it opens one."""

    def __init__(self, check: Check, watch: Watch, **options: Any) -> None:
        self._pools = _watched_pools(check, watch)
        super().__init__(**options)

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        super().init_poolmanager(*args, **options)
        self.poolmanager.pool_classes_by_scheme = self._pools


def _watched_pools(check: Check, watch: Watch) -> dict[str, type[HTTPConnectionPool]]:
    class Plain(HTTPConnection):
        def connect(self) -> None:
            check()
            super().connect()
            watch(self.sock)

    class Secure(HTTPSConnection):
        def connect(self) -> None:
            check()
            super().connect()
            watch(self.sock)

    class PlainPool(HTTPConnectionPool):
        ConnectionCls = Plain

    class SecurePool(HTTPSConnectionPool):
        ConnectionCls = Secure

    return {"http": PlainPool, "https": SecurePool}
