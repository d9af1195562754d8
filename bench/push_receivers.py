"""The peers of a bare gloo broadcast: ranks as threads of this process, without SGLang and fleet.

python -m bench.push_receivers PORT GROUP WORLD_SIZE BYTES
"""

from __future__ import annotations

import sys
import threading

import torch
import torch.distributed as dist

from sglang_rollout.testing.process_groups import Rank


def receive(rank: Rank, nbytes: int) -> None:
    """Join, and take part in broadcasts, each followed by a barrier, until the process is killed."""
    rank.join()
    group, buffer = rank._process_group, torch.empty(nbytes, dtype=torch.uint8)
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    while True:
        group.broadcast([buffer], options).wait()
        group.barrier().wait()


def main() -> None:
    """Run all ranks except the first."""
    port, group, world_size, nbytes = int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:5])
    torch.set_num_threads(1)
    ranks = [Rank(host="127.0.0.1", port=port, group=group, rank=rank, world_size=world_size) for rank in range(1, world_size)]
    threads = [threading.Thread(target=receive, args=(rank, nbytes)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
