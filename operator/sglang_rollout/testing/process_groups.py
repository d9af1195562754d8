"""A stand-in's ranks of weight-update groups: real gloo, joined as SGLang's ``init_custom_process_group`` does. Needs torch.

SGLang's recipe: a client of the TCP store at the trainer's address that counts itself, as torch's rendezvous does, then
``PrefixStore(<group>)``, into which torch puts ``<group>/`` and ``<device>/``.
Each rank is an object with its own gloo device, so one process can hold any number of ranks. Everything here blocks: call it in a thread.

A rank that is killed closes its connections to the peers, as when a process is killed. gloo has no way to end a call that waits, so a rank
that waits in a call keeps its connections until the call ends. If this matters, run the engine in its own process and kill the process.

**NCCL semantics** (``nccl=True``). With NCCL the join returns before there is a communicator, which connects at the first collective. If a
peer dies, the other ranks wait forever. Here the join returns when the store has been reached, and connects after the answer (gloo trainers
wait for that in their own join). Any failure of gloo becomes a wait that only ``kill`` ends.
"""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

JOIN_SECONDS = 1800.0
"""torch's default for process groups, which SGLang does not change."""
_TRY_SECONDS = 2.0
"""Duration of one attempt to reach a store. A kill is noticed between attempts."""
_AGAIN_SECONDS = 0.1


class Killed(Exception):
    """The engine was killed while this thread waited for it."""


class Rank:
    """One rank of one process group."""

    def __init__(self, *, host: str, port: int, group: str, rank: int, world_size: int, nccl: bool = False) -> None:
        self._host, self._port, self._group = host, port, group
        self._rank, self._world_size = rank, world_size
        self._nccl = nccl
        self._killed = threading.Event()
        self._connected = threading.Event()
        self._failure: Exception | None = None
        self._process_group: Any = None

    def join(self) -> None:
        """Join and wait for all ranks; with NCCL semantics, wait only for the store. Raises the errors of torch."""
        store = self.reach()
        if self._nccl:
            threading.Thread(target=self._connect, args=(store,), daemon=True, name=f"nccl-{self._group}").start()
            return
        self._connect(store)
        if self._failure:
            raise self._failure

    def reach(self) -> Any:
        """Return the trainer's store. Waits until the store listens, as SGLang does, also for the name of an existing group.

        Raises:
            Killed: The engine was killed.
            RuntimeError: No store listens after JOIN_SECONDS.
        """
        end = time.monotonic() + JOIN_SECONDS
        while not self._killed.is_set():
            # torch's own client cannot be interrupted and logs a long traceback for each failure, so probe the port first.
            try:
                socket.create_connection((self._host, self._port), _TRY_SECONDS).close()
            except OSError as error:
                if time.monotonic() > end:
                    raise RuntimeError(f"no store listens at {self._host}:{self._port}: {error}") from error
                self._killed.wait(_AGAIN_SECONDS)
            else:
                limit = timedelta(seconds=JOIN_SECONDS)
                # Made with a world size, the client counts itself, for which rank 0 of torch's rendezvous waits.
                return dist.TCPStore(self._host, self._port, self._world_size, False, timeout=limit)
        raise Killed

    def receive(self, nbytes: int) -> bytes:
        """Receive one broadcast of rank 0 and return its bytes. Empty tensors are broadcast, too, as in SGLang."""
        joined = self._joined()
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        try:
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            options.timeout = timedelta(seconds=JOIN_SECONDS)
            joined.broadcast([buffer], options).wait()
        except RuntimeError as error:
            self._fail(error)
        return bytes(buffer.numpy().tobytes())

    def kill(self) -> None:
        """Leave the process group and end the waits of this rank, except inside of gloo. No later call works."""
        self._killed.set()
        self._connected.set()
        self._process_group = None  # gloo closes the connections when no call uses the process group

    def _connect(self, store: Any) -> None:
        prefixed = dist.PrefixStore(self._group, store)
        for part in (f"{self._group}/", "cpu/"):
            prefixed = dist.PrefixStore(part, prefixed)
        try:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=JOIN_SECONDS)
            options._devices = [self._device()]
            joined = dist.ProcessGroupGloo(prefixed, self._rank, self._world_size, options)
            self._process_group = None if self._killed.is_set() else joined
        except Exception as error:  # noqa: BLE001 - torch raises many types; the joining thread raises it again
            self._failure = error
        self._connected.set()

    def _device(self) -> Any:
        """Listen on the address that routes to the trainer, because the host name may resolve to an unreachable address."""
        try:
            return dist.ProcessGroupGloo.create_device(hostname=local_address(self._host, self._port))
        except RuntimeError:
            return dist.ProcessGroupGloo.create_default_device()

    def _joined(self) -> Any:
        """Return the process group, after waiting for a join with NCCL semantics."""
        self._connected.wait()
        if self._failure:
            self._fail(self._failure)
        joined = self._process_group
        if joined is None:
            raise Killed
        return joined

    def _fail(self, error: Exception) -> None:
        if self._nccl:
            self._killed.wait()
        if self._killed.is_set():
            raise Killed from error
        raise error


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
