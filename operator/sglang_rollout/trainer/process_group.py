"""The trainer's side of a process group: rank 0, which hosts the store and broadcasts. The only module that imports torch.

The engines join with SGLang's ``init_custom_process_group``: a TCP store at the trainer's address, then
``PrefixStore(<group>, store)``, into which torch's ``_new_process_group_helper`` puts ``<group>/`` and ``<device>/``.
A plain ``init_process_group`` would use other prefixes and wait for the engines until its timeout.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sglang_rollout.trainer.calls import Deadline
from sglang_rollout.trainer.ranks import Ranks
from sglang_rollout.trainer.tensors import Bucket, TensorSpec

log = logging.getLogger(__name__)


class Rendezvous:
    """The store in which one process group forms, with a new port and a random name for each group.

    A second group with the port or name of the first finds old keys in the store and fails at the first broadcast.

    torch's ``rendezvous("tcp://…")`` is not used for rank 0, because it needs a port that nothing keeps free until it listens, and because
    nothing ends its wait for clients: :meth:`abort` must, when the fleet refuses. gloo waits for the ranks in its place.
    """

    def __init__(self, *, host: str, world_size: int, backend: str, device: str | None, deadline: Deadline) -> None:
        self.name = f"rollout-{secrets.token_hex(6)}"
        self.host = host
        self.world_size = world_size
        self.backend = backend
        self.device = _with_index(torch.device(device or ("cpu" if backend == "gloo" else "cuda")))
        self._deadline = deadline
        limit = timedelta(seconds=deadline.seconds)
        # Server and client of the store are two objects, so that abort() can close the server while a client waits.
        # The server listens on all addresses; with port 0 the kernel chooses a free port.
        self._server: Any = dist.TCPStore("localhost", 0, None, True, timeout=limit, wait_for_workers=False)
        self.port: int = self._server.port

    def facts(self) -> dict[str, Any]:
        """Return the facts that the fleet compares before engines join: version and settings of NCCL."""
        if self.backend != "nccl":
            return {}
        settings = {key: value for key, value in os.environ.items() if key.startswith("NCCL_")}
        return {"nccl": {"version": ".".join(map(str, torch.cuda.nccl.version())), "settings": settings}}

    def join(self) -> Any:
        """Join as rank 0, and return torch's process group. With gloo, block until all engines have joined or the deadline passes."""
        limit = timedelta(seconds=max(self._deadline.remaining, 1.0))
        store = dist.TCPStore("localhost", self.port, None, False, timeout=limit, wait_for_workers=False)
        return self._join_gloo(store, limit) if self.backend == "gloo" else self._join_other(store, limit)

    def abort(self) -> None:
        """Close the store, so that all clients that wait in it (this trainer and engines) fail at once."""
        self._server = None

    def _join_gloo(self, store: Any, limit: timedelta) -> Any:
        prefixed = dist.PrefixStore("cpu/", dist.PrefixStore(f"{self.name}/", dist.PrefixStore(self.name, store)))
        options = dist.ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [self._gloo_device()]
        return dist.ProcessGroupGloo(prefixed, 0, self.world_size, options)

    def _gloo_device(self) -> Any:
        """Return a device that listens on the address that the engines know, not on the one of this machine's host name."""
        try:
            return dist.ProcessGroupGloo.create_device(hostname=self.host)
        except RuntimeError as error:  # with NAT this machine does not have the address itself
            log.warning("gloo cannot listen on %s and uses its default address: %s", self.host, error)
            return dist.ProcessGroupGloo.create_default_device()

    def _join_other(self, store: Any, limit: timedelta) -> Any:
        c10d: Any = dist.distributed_c10d
        group, _ = c10d._new_process_group_helper(
            self.world_size,
            0,
            [],
            c10d.Backend(self.backend),
            dist.PrefixStore(self.name, store),
            group_name=self.name,
            backend_options=None,
            timeout=limit,
        )
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(self.world_size)}
        return group


def _with_index(device: torch.device) -> torch.device:
    """Add the index of the current GPU to the device, because a background thread defaults to GPU 0."""
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


def connect_ranks(ranks: Sequence[int], *, timeout: float) -> Ranks:
    """Begin a push of these global ranks of the trainer's ``torch.distributed``. The first rank leads."""
    store: Any = dist.distributed_c10d._get_default_store()
    # A separate connection, if torch can clone the store: other threads, such as NCCL's watchdog, use the store too.
    separate = store.clone() if hasattr(store, "clone") else store
    return Ranks(dist.PrefixStore(f"sglang-rollout/{'-'.join(map(str, ranks))}", separate), dist.get_rank(), ranks, timeout=timeout)


def copy_bytes(tensor: Any) -> memoryview:
    """Copy the tensor's bytes to host memory."""
    with torch.no_grad():
        return memoryview(_flatten(tensor).to("cpu", copy=True).numpy())


def read_bytes(tensor: Any) -> memoryview:
    """Return the tensor's bytes in host memory: a view of a contiguous tensor that is there already, else a copy."""
    with torch.no_grad():
        return memoryview(_flatten(tensor).cpu().numpy())


def _flatten(tensor: Any) -> Any:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class FilledBuffer:
    """A staging buffer that contains the bytes of one bucket."""

    data: Any
    ready: Any
    """CUDA event after the last copy into the buffer; None in host memory."""


class ProcessGroup:
    """An open process group. It belongs to one epoch: when engines join, leave or restart, the trainer needs a new one."""

    def __init__(self, rendezvous: Rendezvous, torch_group: Any, *, epoch: int, members: list[str]) -> None:
        self.name = rendezvous.name
        self.epoch = epoch
        self.world_size = rendezvous.world_size
        self.backend = rendezvous.backend
        self.device = rendezvous.device
        self.members = members
        self._rendezvous = rendezvous
        self._torch_group: Any = torch_group
        self._staging: list[Any] = [None, None]

    def flatten(self, bucket: Bucket[Any], turn: int, full: Callable[[TensorSpec, Any], Any] = lambda _, tensor: tensor) -> FilledBuffer:
        """Copy the bucket's tensors into one of two staging buffers. One buffer is filled while the other is sent.

        On a GPU the copies run on the caller's stream, and an event marks their end. The buffer of ``turn`` may be filled
        again after ``broadcast`` of ``turn - 2`` has returned. The order of streams is tested with a fake ``torch.cuda``
        only; it has not run on a GPU.

        Args:
            bucket: The tensors.
            turn: Number of the bucket.
            full: Returns the tensor to copy. Called for every tensor, in order, also after a failed copy, because it may be
                a collective that the trainer's other ranks call too.
        """
        buffer = self._staging[turn % 2]
        if buffer is None or buffer.numel() < bucket.nbytes:
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self.device)
            self._staging[turn % 2] = buffer
        failed: Exception | None = None
        with torch.no_grad():
            for offset, spec, tensor in bucket.placed_items():
                gathered = full(spec, tensor)
                if failed is None:
                    try:
                        source = _flatten(gathered)
                        buffer[offset : offset + source.numel()].copy_(source)
                    except Exception as error:  # noqa: BLE001 - raised below, after the last collective
                        failed = error
        if failed is not None:
            raise failed
        return FilledBuffer(buffer[: bucket.nbytes], self._record_event())

    def _record_event(self) -> Any:
        """Record an event on the caller's stream, and return it; None in host memory."""
        if self.device.type != "cuda":
            return None
        with torch.cuda.device(self.device):
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream())
        return event

    def host_bytes(self, tensor: Any) -> memoryview:
        """Copy the tensor's bytes to host memory."""
        return copy_bytes(tensor)

    def broadcast(self, buffer: FilledBuffer, *, timeout: float) -> None:
        """Send a buffer to every engine. Block until the buffer may be written again: call this in a background thread."""
        if buffer.ready is None:
            self._send(buffer.data, timeout)
            return
        with torch.cuda.device(self.device):
            # Each thread has its own current stream, which would read before the caller's copies are done.
            stream = torch.cuda.current_stream()
            stream.wait_event(buffer.ready)
            self._send(buffer.data, timeout)
            stream.synchronize()  # NCCL's wait() only orders streams

    def _send(self, data: Any, timeout: float) -> None:
        # Freeing a process group waits for its broadcast, which may wait for a lost peer until the timeout. So this thread keeps
        # a reference during the broadcast, and close() in another thread never frees the group.
        torch_group = self._torch_group
        if self.backend != "gloo":
            dist.broadcast(data, src=0, group=torch_group, async_op=True).wait()
            return
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=timeout)
        torch_group.broadcast([data], options).wait()

    def close(self) -> None:
        """Leave the process group and free its buffers. ``Fleet`` makes the engines leave."""
        torch_group, self._torch_group = self._torch_group, None
        self._rendezvous.abort()
        self._staging = [None, None]
        if torch_group is not None and self.backend != "gloo":
            # abort, not destroy: destroying waits for operations that may never end
            dist.distributed_c10d._abort_process_group(torch_group)
