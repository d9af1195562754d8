"""Clients of the trainers' stores: one per store and process, and none that waits where a kill cannot reach it.

Every connection to a torch store costs a reverse look-up of an address on both sides, which takes seconds where the name server is slow:
fifty ranks of one process share a connection. That works because a wait here is a poll, so nobody holds the client for long.
"""

from __future__ import annotations

import socket
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

JOIN_SECONDS = 1800.0
"""torch's default for groups, which SGLang does not change."""
_TRY_SECONDS = 2.0
"""One attempt to reach a store; between attempts a kill is noticed."""
_AGAIN_SECONDS = 0.1
_POLL_SECONDS = 0.02


class Killed(Exception):
    """The engine was killed while this thread waited for it."""


class _Client:
    """A store's client, for as long as a rank holds it."""

    def __init__(self, host: str, port: int) -> None:
        limit = timedelta(seconds=JOIN_SECONDS)
        self.store = dist.TCPStore(host, port, None, False, timeout=limit, wait_for_workers=False)

    @property
    def works(self) -> bool:
        """Whether its store still answers: another one may listen at the same port now."""
        try:
            self.store.check(["sglang_rollout"])
        except RuntimeError:
            return False
        return True


_clients: weakref.WeakValueDictionary[tuple[str, int], _Client] = weakref.WeakValueDictionary()
_connecting = threading.Lock()


def reach(host: str, port: int, killed: threading.Event) -> _Client:
    """The client of a store; waits for the store to listen, as SGLang does. Raises Killed, or RuntimeError after JOIN_SECONDS."""
    end = time.monotonic() + JOIN_SECONDS
    while True:
        if killed.is_set():
            raise Killed
        with _connecting:
            client = _clients.get((host, port))
            if client is not None and client.works:
                return client
            # torch's own client cannot be interrupted, and reports each failure with a page of frames: ask first whether it will get in.
            try:
                socket.create_connection((host, port), _TRY_SECONDS).close()
            except OSError as error:
                why = error
            else:
                client = _clients[host, port] = _Client(host, port)
                return client
        if time.monotonic() > end:
            raise RuntimeError(f"no store listens at {host}:{port}: {why}")
        killed.wait(_AGAIN_SECONDS)


def interruptible(client: _Client, killed: threading.Event) -> Any:
    """The store of a client, as torch wants it. Keep the result: C++ would go on with a store whose Python half is gone."""
    return _Interruptible(client, killed)


class _Interruptible(dist.Store):  # type: ignore[misc]
    """A store whose waiting ends when the engine is killed: gloo would sit in the C++ client until its time-out."""

    def __init__(self, client: _Client, killed: threading.Event) -> None:
        super().__init__()
        self._client, self._inner, self._killed = client, client.store, killed

    def set(self, key: str, value: Any) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> Any:
        self.wait([key])
        return self._inner.get(key)

    def add(self, key: str, value: int) -> int:
        return int(self._inner.add(key, value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        end = time.monotonic() + (timeout.total_seconds() if timeout else JOIN_SECONDS)
        while not self._inner.check(keys):
            if self._killed.wait(_POLL_SECONDS):
                raise RuntimeError("the engine was killed")
            if time.monotonic() > end:
                raise RuntimeError(f"wait timeout after {JOIN_SECONDS * 1000:.0f}ms, keys: {', '.join(keys)}")

    def delete_key(self, key: str) -> bool:
        return bool(self._inner.delete_key(key))

    def num_keys(self) -> int:
        return int(self._inner.num_keys())
