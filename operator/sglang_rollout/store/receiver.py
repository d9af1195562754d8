"""One process group of a trainer, in a process of its own: joins as torch's ranks do, and receives broadcasts into a file.

The weight store starts ``python -m sglang_rollout.store.receiver`` for each process group, because nothing but a kill ends a call of NCCL
that waits for a lost peer. The only module of the store that imports torch. One line of JSON per command and per answer:

    (start)                                                        {"ready": true}
    {"do": "join", "host", "port", "group", …}                     {"done": true}
    {"do": "receive", "path", "data_start", "sizes", "deadline"}   {"received": BYTES} …, {"done": true}

After a failure the answer is {"error": TEXT}, with a "code" if the process group could not be joined. Then the process ends, because
the process group cannot be used again.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from sglang_rollout.json_text import load_json
from sglang_rollout.wire.reasons import RefusalCode
from sglang_rollout.wire.staged import PIECE_BYTES

_PR_SET_PDEATHSIG = 1
_CONNECT_SHARE = 3
"""torch's client tries to connect for up to 2.5 times its timeout. The fleet has just seen that the store answers."""


class JoinError(Exception):
    """The process group could not be joined: a code, and a clause."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Member:
    """This process's membership in one process group.

    As SGLang's ``init_custom_process_group``: the TCP store at the trainer's address, then ``PrefixStore(<group>)``, into which torch puts
    ``<group>/`` and ``<device>/``.

    Args:
        host: Address of the trainer's TCP store.
        port: Its port.
        group: Name of the process group.
        rank: Rank of this process.
        world_size: Number of ranks.
        backend: ``gloo``, which receives into host memory, or ``nccl``, which receives into the memory of a GPU.
        deadline: Seconds to join.
        device: Device whose memory receives; None: the one that the backend needs.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        group: str,
        rank: int,
        world_size: int,
        backend: str,
        deadline: float,
        device: str | None = None,
    ) -> None:
        self._is_gloo = backend == "gloo"
        if not self._is_gloo and not torch.cuda.is_available():
            message = f"backend {backend} needs a GPU, and torch finds none beside the weight store: set weights.store.gpu, or use gloo"
            raise JoinError(RefusalCode.BACKEND_UNAVAILABLE, message)
        self._device = device if device is not None or self._is_gloo else "cuda:0"
        end, limit = time.monotonic() + deadline, timedelta(seconds=deadline)
        # Created before the store is reached, because rank 0 counts a join that fails later, too.
        gloo_device = _gloo_device(host, port) if self._is_gloo else None
        store = dist.PrefixStore(group, _reach_store(host, port, group=group, world_size=world_size, deadline=deadline))
        if self._is_gloo:
            left = max(end - time.monotonic(), 0.1)
            self._group: Any = _join_gloo(store, gloo_device, group=group, rank=rank, world_size=world_size, deadline=left)
        else:
            self._group = _join_with_helper(store, group=group, rank=rank, world_size=world_size, backend=backend, limit=limit)

    def receive(self, buffer: Any, deadline: float) -> None:
        """Receive one broadcast of rank 0 into a byte tensor in host memory. An empty tensor is broadcast, too, as in SGLang."""
        if self._device is None:
            self._broadcast(buffer, deadline)
            return
        arrived = torch.empty(buffer.numel(), dtype=torch.uint8, device=self._device)
        self._broadcast(arrived, deadline)
        buffer.copy_(arrived)  # blocks until the copy is complete, because the host memory is pageable

    def _broadcast(self, buffer: Any, deadline: float) -> None:
        if not self._is_gloo:
            # The store kills this process at the deadline. NCCL was not run yet, because it needs a GPU beside the store.
            dist.broadcast(buffer, src=0, group=self._group, async_op=True).wait()
            return
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=deadline)
        self._group.broadcast([buffer], options).wait()


def _reach_store(host: str, port: int, *, group: str, world_size: int, deadline: float) -> Any:
    """Return a client of the trainer's store that has counted itself once, however often this rank tries to join the process group.

    Rank 0 of torch's ``rendezvous("tcp://…")``, with which frameworks open their process groups, waits until ``world_size`` clients that
    know the world size have connected. Nothing takes a count back, so a second attempt that counts would stand for a rank that is absent.
    """
    limit = timedelta(seconds=deadline / _CONNECT_SHARE)
    try:
        store = dist.TCPStore(host, port, None, False, timeout=limit, wait_for_workers=False)
        if store.add(f"sglang-rollout/{group}/attempts", 1) == 1:
            store = dist.TCPStore(host, port, world_size, False, timeout=limit)
    except RuntimeError as error:
        message = f"no store of rank 0 answers at {host}:{port}: check master_address and master_port ({_line(error)})"
        raise JoinError(RefusalCode.MASTER_UNREACHABLE, message) from error
    return store


def _join_gloo(store: Any, device: Any, *, group: str, rank: int, world_size: int, deadline: float) -> Any:
    """Join with torch's prefixes below that of the group's name."""
    for part in (f"{group}/", "cpu/"):
        store = dist.PrefixStore(part, store)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=deadline)
    options._devices = [device]
    try:
        return dist.ProcessGroupGloo(store, rank, world_size, options)
    except dist.DistStoreError as error:  # the address of rank 0 did not come
        values = f"world_size {world_size} and backend gloo"
        message = f"rank 0 did not open it with {values} within {deadline:.0f} s: give rank 0 the values of this call"
        raise JoinError(RefusalCode.RANK_ZERO_ABSENT, message) from error
    except dist.DistNetworkError as error:
        message = f"rank 0 closed its store before it opened the process group: its log has the reason ({_line(error)})"
        raise JoinError(RefusalCode.MASTER_UNREACHABLE, message) from error
    except RuntimeError as error:
        message = f"rank 0 and the weight store do not reach each other: allow TCP on any port in both directions ({_line(error)})"
        raise JoinError(RefusalCode.RANKS_NOT_CONNECTED, message) from error


def _join_with_helper(store: Any, *, group: str, rank: int, world_size: int, backend: str, limit: timedelta) -> Any:
    """Join as SGLang does. With NCCL this returns before the ranks are connected, which happens at the first broadcast."""
    c10d: Any = dist.distributed_c10d
    made, _ = c10d._new_process_group_helper(
        world_size, rank, [], c10d.Backend(backend), store, group_name=group, backend_options=None, timeout=limit
    )
    c10d._world.pg_group_ranks[made] = {each: each for each in range(world_size)}
    return made


def _gloo_device(host: str, port: int) -> Any:
    """Listen on the address that routes to the trainer, because the host name may resolve to an unreachable address."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # UDP: chooses a route and sends nothing
        address = str(probe.getsockname()[0])
    try:
        return dist.ProcessGroupGloo.create_device(hostname=address)
    except RuntimeError:
        return dist.ProcessGroupGloo.create_default_device()


def receive_into_file(member: Member, answers: TextIO, *, path: Path, data_start: int, sizes: Sequence[int], deadline: float) -> None:
    """Receive one broadcast per size into a file, one behind the other, and report how many bytes are complete.

    Args:
        member: Membership in the process group.
        answers: Where to report.
        path: File of the shard, which has its full length.
        data_start: Offset of the first byte.
        sizes: Bytes of each broadcast.
        deadline: Seconds for each broadcast.
    """
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        data = torch.frombuffer(mapped, dtype=torch.uint8)[data_start:]
        received = reported = 0
        for size in sizes:
            member.receive(data[received : received + size], deadline)
            received += size
            if received - reported >= PIECE_BYTES:
                answer(answers, received=received)
                reported = received
        del data  # the file cannot be unmapped before


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def answer(answers: TextIO, **fields: Any) -> None:
    """Write one answer."""
    answers.write(json.dumps(fields) + "\n")
    answers.flush()


def serve(commands: TextIO, answers: TextIO) -> None:
    """Obey the store until it closes the pipe. Raises the errors of torch."""
    member: Member | None = None
    answer(answers, ready=True)
    for line in commands:
        command = load_json(line)
        action = command.pop("do")
        if action == "join":
            member = Member(**command)
        elif member is not None:
            receive_into_file(member, answers, path=Path(command.pop("path")), **command)
        answer(answers, done=True)


def main() -> None:
    """Run one receiver."""
    # The kernel kills this process with its parent, also while a call of NCCL blocks it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # NCCL logs to the standard output
    torch.set_num_threads(1)
    try:
        serve(sys.stdin, answers)
    except JoinError as error:
        answer(answers, error=str(error), code=error.code)
    except Exception as error:  # noqa: BLE001 - torch raises many types; the store reports the text
        answer(answers, error=_line(error))
    # Freeing a process group may wait for a lost peer.
    os._exit(0)


if __name__ == "__main__":
    main()
