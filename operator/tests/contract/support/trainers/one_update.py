"""A trainer's part of one weight update over gloo; run by the engine environment's Python, which has torch.

    one_update.py MODEL PORT GROUP SCALE RANKS [TENSORS]

RANKS: number of the engine's ranks. After joining the process group, the program prints names, dtypes and shapes as JSON and waits for a
line on standard input. Then it broadcasts all tensors, or only the first TENSORS before it ends like a killed trainer.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import load_file

from sglang_rollout.testing.trainer_group import broadcast, open_group

LIMIT = timedelta(minutes=10)


def main(model: str, port: str, group: str, scale: str, ranks: str, tensors: str = "") -> None:
    weights = {
        name: (tensor.float() * float(scale)).to(tensor.dtype) for name, tensor in load_file(Path(model) / "model.safetensors").items()
    }
    made = open_group(host="127.0.0.1", port=int(port), group=group, world_size=1 + int(ranks), timeout=LIMIT)
    described = {
        "names": list(weights),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()],
        "shapes": [list(tensor.shape) for tensor in weights.values()],
    }
    print(json.dumps(described), flush=True)
    sys.stdin.readline()
    broadcast(made, list(weights.values())[: int(tensors)] if tensors else list(weights.values()))
    if tensors:
        os._exit(1)
    sys.stdin.readline()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
