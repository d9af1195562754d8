"""A stand-in's side of a weight-update group: real gloo, joined as SGLang's ``init_custom_process_group`` does. With ``sockets``, all that
torch is needed for.

SGLang's recipe: a TCP store at the trainer's address, then ``PrefixStore(<group>)``, into which torch puts ``<group>/`` and ``<device>/``.
Each rank is an object with a store client and a gloo device of its own, so one process can hold as many ranks as it likes. Everything here
blocks: call it in a thread. ``kill`` makes whoever blocks give up, and the peers see closed connections, as when a process is killed.

**NCCL semantics** (``nccl=True``). With NCCL the join answers before there is a communicator, which connects at the first collective, and a
peer that dies leaves the others waiting for ever. Here the join returns when the store has been reached and connects behind the answer
(gloo trainers wait for that in their own join), and any failure of gloo becomes a wait that only ``kill`` ends.
"""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sglang_rollout.trainer.testing.sockets import SocketsOfDevice

JOIN_SECONDS = 1800.0
"""torch's default for groups, which SGLang does not change."""
_STORE_TRY_SECONDS = 2.0
"""One attempt to reach the store; between attempts a kill is noticed."""
_POLL_SECONDS = 0.02


class Killed(Exception):
    """The engine was killed while this thread waited for it."""


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
        """Join, and return when all ranks are in; with NCCL semantics, when the store has been reached. Raises what torch raises."""
        store = self._reach_store()
        if self._nccl:
            threading.Thread(target=self._connect, args=(store,), daemon=True, name=f"nccl-{self._group}").start()
            return
        self._connect(store)
        if self._failure:
            raise self._failure

    def reach(self) -> None:
        """Reach the trainer's store and do nothing in it: all that SGLang does for a name that is in use."""
        self._reach_store()

    def receive(self, nbytes: int) -> bytes:
        """Take part in one broadcast of rank 0 and return its bytes. A zero-sized tensor is broadcast too, as SGLang does."""
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
        """Leave the group; nobody may be waiting in it."""
        self.kill()
        self._process_group = None

    def kill(self) -> None:
        """End all waiting in this rank and close its connections under the peers."""
        self._killed.set()
        self._connected.set()
        if self._sockets:
            self._sockets.shut()

    def _reach_store(self) -> Any:
        end = time.monotonic() + JOIN_SECONDS
        while True:
            try:
                limit = timedelta(seconds=_STORE_TRY_SECONDS)
                store = dist.TCPStore(self._host, self._port, None, False, timeout=limit, wait_for_workers=False)
            except RuntimeError:
                self._check()
                if time.monotonic() > end:
                    raise
            else:
                store.set_timeout(timedelta(seconds=JOIN_SECONDS))
                return store

    def _connect(self, store: Any) -> None:
        self._store = _Interruptible(store, self._killed)  # kept: C++ would go on with a store whose Python half is gone
        prefixed = dist.PrefixStore(self._group, self._store)
        for part in (f"{self._group}/", "cpu/"):
            prefixed = dist.PrefixStore(part, prefixed)
        try:
            self._sockets, device = SocketsOfDevice.of(self._device)
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=JOIN_SECONDS)
            options._devices = [device]
            self._process_group = dist.ProcessGroupGloo(prefixed, self._rank, self._world_size, options)
        except Exception as error:  # noqa: BLE001 - torch raises what it likes, and the caller is in another thread
            self._failure = error
        self._connected.set()

    def _device(self) -> Any:
        """Listen on the address from which the trainer is reached: our host name may resolve to one that it does not reach."""
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
    """Our address on the interface that routes to ``host``."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # UDP: chooses a route and sends nothing
        return str(probe.getsockname()[0])


def converted(data: bytes, dtype: str, wanted: str) -> bytes:
    """The numbers of one type in another: a model keeps its types, whatever is sent."""
    source = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)) if data else torch.empty(0, dtype=getattr(torch, dtype))
    return bytes(source.to(getattr(torch, wanted)).view(torch.uint8).numpy().tobytes())


def tensor(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
    """A torch tensor of its own memory."""
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)


class _Interruptible(dist.Store):  # type: ignore[misc]
    """A store whose waiting ends when the engine is killed: gloo would sit in the C++ client until its time-out."""

    def __init__(self, inner: Any, killed: threading.Event) -> None:
        super().__init__()
        self._inner, self._killed = inner, killed

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
