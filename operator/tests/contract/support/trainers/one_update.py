"""A trainer's part of one weight update over gloo; run by the engine environment's Python, which has torch.

    one_update.py MODEL PORT GROUP SCALE RANKS [TENSORS]

RANKS: number of the engine's ranks. After joining the process group, the program prints names, dtypes and shapes as JSON and waits for a
line on standard input. Then it broadcasts all tensors, or only the first TENSORS before it ends like a killed trainer.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, default_pg_timeout, rendezvous


def main(model: str, port: str, group: str, scale: str, ranks: str, tensors: str = "") -> None:
    world = 1 + int(ranks)
    weights = {
        name: (tensor.float() * float(scale)).to(tensor.dtype) for name, tensor in load_file(Path(model) / "model.safetensors").items()
    }
    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, world, timeout=default_pg_timeout))
    made, _ = _new_process_group_helper(
        world, 0, [], Backend("gloo"), PrefixStore(group, store), group_name=group, backend_options=None, timeout=default_pg_timeout
    )
    _world.pg_group_ranks[made] = {rank: rank for rank in range(world)}
    described = {
        "names": list(weights),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()],
        "shapes": [list(tensor.shape) for tensor in weights.values()],
    }
    print(json.dumps(described), flush=True)
    sys.stdin.readline()
    wanted = list(weights.values())[: int(tensors)] if tensors else list(weights.values())
    for tensor in wanted:
        dist.broadcast(tensor, 0, group=made)
    if tensors:
        os._exit(1)
    sys.stdin.readline()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
