"""Run a Python block of the pages, with the names that pages use and do not define. The engine environment's Python has torch.

page_block.py URL MODEL FILE PAGE      FILE contains the block
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sglang_rollout import trainer


def module_of(tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Return a module with these parameters. Its state dict has their names."""
    made = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        parent = made
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = getattr(parent, part)
        parent.register_parameter(last, torch.nn.Parameter(tensor))
    return made


def known_names(url: str, model: str) -> dict[str, Any]:
    """Return what a training loop has at the place of a block."""
    return {
        "fleet": trainer.connect(url),
        "model": module_of(load_file(f"{model}/model.safetensors")),
        "prompts": [[11, 12, 13], [21, 22]],
        "params": {"max_new_tokens": -1},  # refused: the block shows how a failure is read
        "step": 1,
        "reward": lambda *_: 1.0,
        "fully_shard": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),))),
        "GenerateFailed": trainer.GenerateFailed,
    }


if __name__ == "__main__":
    url, model, file, page = sys.argv[1:]
    # By default a CUDA build of torch takes NCCL, also on a machine without GPUs.
    dist.init_process_group = functools.partial(dist.init_process_group, "gloo")
    exec(compile(Path(file).read_text(), page, "exec"), known_names(url, model))
