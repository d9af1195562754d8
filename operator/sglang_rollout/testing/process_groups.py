"""A stand-in's ranks of weight-update groups: real gloo, joined as SGLang's ``init_custom_process_group`` does. Needs torch.

SGLang's recipe: a TCP store at the trainer's address, then ``PrefixStore(<group>)``, into which torch puts ``<group>/`` and ``<device>/``.
Each rank is an object with its own gloo device, so one process can hold any number of ranks. Everything here blocks: call it in a thread.
``kill`` makes blocked threads give up, and the peers see closed connections, as when a process is killed.

**NCCL semantics** (``nccl=True``). With NCCL the join answers before there is a communicator, which connects at the first collective, and a
peer that dies leaves the others waiting forever. Here the join returns when the store has been reached and connects after the answer
(gloo trainers wait for that in their own join). Any failure of gloo becomes a wait that only ``kill`` ends.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

JOIN_SECONDS = 1800.0
"""torch's default for groups, which SGLang does not change."""
_TRY_SECONDS = 2.0
"""Duration of one attempt to reach a store. A kill is noticed between attempts."""
_AGAIN_SECONDS = 0.1
_POLL_SECONDS = 0.02


class Killed(Exception):
    """The engine was killed while this thread waited for it."""


class _Client:
    """Client of a trainer's store, shared by all ranks of the process and kept while a rank holds it.

    Each connection to a torch store costs a reverse look-up of an address on both sides, which takes seconds with a slow name server.
    Sharing works because waiting is a poll, so no rank blocks the client for long.
    """

    def __init__(self, host: str, port: int) -> None:
        limit = timedelta(seconds=JOIN_SECONDS)
        self.store = dist.TCPStore(host, port, None, False, timeout=limit, wait_for_workers=False)

    @property
    def works(self) -> bool:
        """True if the store still answers. Another store may listen at the same port now."""
        try:
            self.store.check(["sglang_rollout"])
        except RuntimeError:
            return False
        return True


_clients: weakref.WeakValueDictionary[tuple[str, int], _Client] = weakref.WeakValueDictionary()
_connecting = threading.Lock()


def reach(host: str, port: int, killed: threading.Event) -> _Client:
    """Return the client of a store. Waits until the store listens, as SGLang does. Raises Killed, or RuntimeError after JOIN_SECONDS."""
    end = time.monotonic() + JOIN_SECONDS
    while True:
        if killed.is_set():
            raise Killed
        with _connecting:
            client = _clients.get((host, port))
            if client is not None and client.works:
                return client
            # torch's own client cannot be interrupted and logs a long traceback for each failure, so probe the port first.
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
    """Return the store of a client as a torch store. Keep the result, because C++ does not keep its Python half alive."""
    return _Interruptible(client, killed)


class _Interruptible(dist.Store):  # type: ignore[misc]
    """A store whose waits end when the engine is killed. gloo would wait in the C++ client until its timeout."""

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


_FDS = Path("/proc/self/fd")
_INFO = Path("/proc/self/fdinfo")
_MAKING = threading.Lock()


class SocketsOfDevice:
    """The connections of one gloo device, so that they can be closed as SIGKILL does. Linux only.

    gloo cannot end a collective from outside: ``abort`` does nothing, and a thread inside it keeps its connections open. But each device
    runs its own epoll, and /proc lists the sockets that an epoll watches. The device is created under a lock, and the epoll that appeared
    meanwhile is its own. ``shut`` shuts down its connections; gloo sees a normal end of the connection on both sides.
    """

    def __init__(self, epolls: list[int]) -> None:
        self._epolls = epolls

    @classmethod
    def of(cls, make: Callable[[], Any]) -> tuple[Self, Any]:
        """Create a device and find the epolls that it opened."""
        with _MAKING:
            before = _open()
            device = make()
            new = {fd: what for fd, what in _open().items() if before.get(fd) != what}
        # Another thread may have made an epoll too: the device's is the one that watches a listening socket which is new as well.
        epolls = [fd for fd, what in new.items() if "eventpoll" in what and any(each in new for each in _watched(fd))]
        return cls(epolls), device

    def shut(self) -> None:
        """Shut down all connections. The listening socket stays: gloo ends the whole process when accept() fails."""
        # What is no socket wakes the device's own thread: as a socket it could not be opened, and its copy would stay open.
        for fd in {fd for epoll in self._epolls for fd in _watched(epoll) if _is_socket(fd)}:
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
                if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    sock.shutdown(socket.SHUT_RDWR)


def _open() -> dict[int, str]:
    found = {}
    with suppress(OSError):
        for entry in _FDS.iterdir():
            with suppress(OSError):  # closed meanwhile
                found[int(entry.name)] = str(entry.readlink())
    return found


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False


def _watched(epoll: int) -> list[int]:
    try:
        text = (_INFO / str(epoll)).read_text()
    except OSError:
        return []
    return [int(number) for number in re.findall(r"^tfd:\s*(\d+)", text, re.MULTILINE)]


class Rank:
    """One rank of one group."""

    def __init__(self, *, host: str, port: int, group: str, rank: int, world_size: int, nccl: bool = False) -> None:
        self._host, self._port, self._group = host, port, group
        self._rank, self._world_size = rank, world_size
        self._nccl = nccl
        self._killed = threading.Event()
        self._connected = threading.Event()
        self._failure: Exception | None = None
        self._sockets: SocketsOfDevice | None = None
        self._process_group: Any = None
        self._store: Any = None

    def join(self) -> None:
        """Join and wait for all ranks; with NCCL semantics, wait only for the store. Raises the errors of torch."""
        store = reach(self._host, self._port, self._killed)
        if self._nccl:
            threading.Thread(target=self._connect, args=(store,), daemon=True, name=f"nccl-{self._group}").start()
            return
        self._connect(store)
        if self._failure:
            raise self._failure

    def reach(self) -> None:
        """Connect to the trainer's store and do nothing else, as SGLang does for a group name that is in use."""
        reach(self._host, self._port, self._killed)

    def receive(self, nbytes: int) -> bytes:
        """Receive one broadcast of rank 0 and return its bytes. Empty tensors are broadcast too, as in SGLang."""
        self._wait_connected()
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        try:
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            options.timeout = timedelta(seconds=JOIN_SECONDS)
            self._process_group.broadcast([buffer], options).wait()
        except RuntimeError as error:
            self._fail(error)
        return bytes(buffer.numpy().tobytes())

    def leave(self) -> None:
        """Leave the process group. No thread may wait in it."""
        self.kill()
        self._process_group = None

    def kill(self) -> None:
        """End all waits of this rank and close its connections to the peers."""
        self._killed.set()
        self._connected.set()
        if self._sockets:
            self._sockets.shut()

    def _connect(self, store: Any) -> None:
        self._store = interruptible(store, self._killed)
        prefixed = dist.PrefixStore(self._group, self._store)
        for part in (f"{self._group}/", "cpu/"):
            prefixed = dist.PrefixStore(part, prefixed)
        try:
            self._sockets, device = SocketsOfDevice.of(self._device)
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=JOIN_SECONDS)
            options._devices = [device]
            self._process_group = dist.ProcessGroupGloo(prefixed, self._rank, self._world_size, options)
        except Exception as error:  # noqa: BLE001 - torch raises many types; the joining thread raises it again
            self._failure = error
        self._connected.set()

    def _device(self) -> Any:
        """Listen on the address that routes to the trainer, because the host name may resolve to an unreachable address."""
        try:
            return dist.ProcessGroupGloo.create_device(hostname=local_address(self._host, self._port))
        except RuntimeError:
            return dist.ProcessGroupGloo.create_default_device()

    def _wait_connected(self) -> None:
        self._connected.wait()
        self._check()
        if self._failure:
            self._fail(self._failure)

    def _fail(self, error: Exception) -> None:
        self._check()
        if self._nccl:
            self._killed.wait()
            raise Killed from error
        raise error

    def _check(self) -> None:
        if self._killed.is_set():
            raise Killed


def local_address(host: str, port: int) -> str:
    """Return the local address on the interface that routes to ``host``."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # UDP: chooses a route and sends nothing
        return str(probe.getsockname()[0])


def converted(data: bytes, dtype: str, wanted: str) -> bytes:
    """Convert numbers from one type to another. A model keeps its types, whatever the trainer sends."""
    source = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)) if data else torch.empty(0, dtype=getattr(torch, dtype))
    return bytes(source.to(getattr(torch, wanted)).view(torch.uint8).numpy().tobytes())


def tensor(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return a torch tensor with a copy of the bytes."""
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)
