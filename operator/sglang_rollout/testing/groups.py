"""A stand-in's side of a weight-update group: real gloo, joined as SGLang's ``init_custom_process_group`` does. With ``stores``, all
that torch is needed for.

SGLang's recipe: a TCP store at the trainer's address, then ``PrefixStore(<group>)``, into which torch puts ``<group>/`` and ``<device>/``.
Each rank is an object with a gloo device of its own, so one process can hold as many ranks as it likes. Everything here
blocks: call it in a thread. ``kill`` makes whoever blocks give up, and the peers see closed connections, as when a process is killed.

**NCCL semantics** (``nccl=True``). With NCCL the join answers before there is a communicator, which connects at the first collective, and a
peer that dies leaves the others waiting for ever. Here the join returns when the store has been reached and connects behind the answer
(gloo trainers wait for that in their own join), and any failure of gloo becomes a wait that only ``kill`` ends.
"""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sglang_rollout.testing.sockets import SocketsOfDevice
from sglang_rollout.testing.stores import JOIN_SECONDS, Killed, interruptible, reach


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
        store = reach(self._host, self._port, self._killed)
        if self._nccl:
            threading.Thread(target=self._connect, args=(store,), daemon=True, name=f"nccl-{self._group}").start()
            return
        self._connect(store)
        if self._failure:
            raise self._failure

    def reach(self) -> None:
        """Reach the trainer's store and do nothing in it: all that SGLang does for a name that is in use."""
        reach(self._host, self._port, self._killed)

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
