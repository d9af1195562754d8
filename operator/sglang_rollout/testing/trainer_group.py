"""The process group of a trainer as RL frameworks open it: rank 0, with torch's public rendezvous. Needs torch.

AReaL, TorchRL, SkyRL, slime and miles copy ``init_process_group`` of OpenRLHF, as SGLang's own ``init_custom_process_group`` does. The
trainers of our tests open their process groups here, so that a fleet that cannot join those frameworks fails the tests. Everything blocks.
"""

from __future__ import annotations

import contextlib
import random
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

PORTS = (20000, 24000)
"""Ports of rendezvous: below the ephemeral ports, and below those of our test servers and of a fleet on one machine."""


def choose_port(host: str = "127.0.0.1") -> int:
    """Return a free port below the ephemeral ones, so that no outgoing connection takes it before the rendezvous listens there.

    Raises:
        OSError: There is none.
    """
    for port in random.sample(range(*PORTS), 100):
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port
    raise OSError(f"no free port on {host} from {PORTS[0]} to {PORTS[1] - 1}")


def open_group(*, host: str, port: int, group: str, world_size: int, timeout: timedelta, backend: str = "gloo") -> Any:
    """Open a process group as rank 0, and return it.

    The rendezvous waits until ``world_size`` clients, with this one, have counted themselves in the store.

    Raises:
        torch.distributed.DistStoreError: Fewer clients than ranks have joined within the time.
    """
    store, _, _ = next(rendezvous(f"tcp://{host}:{port}", 0, world_size, timeout=timeout))
    store.set_timeout(timeout)
    made, _ = _new_process_group_helper(
        world_size, 0, [], Backend(backend), PrefixStore(group, store), group_name=group, backend_options=None, timeout=timeout
    )
    _world.pg_group_ranks[made] = {rank: rank for rank in range(world_size)}
    return made


def open_stateless_group(*, host: str, port: int, group: str, world_size: int, timeout: timedelta) -> Any:
    """Open a process group that torch does not register, and return it.

    The store is that of vLLM's ``StatelessProcessGroup``, which TRL and NeMo-RL use: a listening socket, without libuv.
    """
    listener = socket.create_server((host, port))
    store = dist.TCPStore(host, port, world_size, is_master=True, timeout=timeout, use_libuv=False, master_listen_fd=listener.detach())
    prefixed = PrefixStore("cpu/", PrefixStore(f"{group}/", PrefixStore(group, store)))
    return dist.ProcessGroupGloo(prefixed, 0, world_size, timeout)


def close_group(group: Any) -> None:
    """Close a process group. A stateless one closes with its last reference, so drop yours."""
    if group in _world.pg_map:
        dist.destroy_process_group(group)


def broadcast(group: Any, tensors: list[torch.Tensor]) -> None:
    """Send tensors one after the other from rank 0. Raises RuntimeError if another rank is lost."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    for work in [group.broadcast([tensor.contiguous()], options) for tensor in tensors]:
        work.wait()
