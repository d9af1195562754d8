"""A trainer that uploads to a fleet with transport Staged, once per line of its input; needs a Python with torch.

upload_on_request.py URL MODEL [delta]
{"scale": X, "version": TEXT, "wait": "staged" | "committed"}     -> the result of the push, or {"phase", "message"} of its failure

``"changed": SHARE`` changes this share of the elements of each tensor. ``delta`` makes delta uploads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from sglang_rollout.trainer import PushFailed, connect

torch.set_num_threads(1)
makes_deltas = "delta" in sys.argv


def change(tensor: torch.Tensor, share: float) -> torch.Tensor:
    """Return a tensor with other values in a share of its elements, the same at each call."""
    flat = tensor.flatten().clone()
    places = torch.randperm(flat.numel(), generator=torch.Generator().manual_seed(flat.numel()))[: int(share * flat.numel())]
    flat[places] = flat[places] * 1.01
    return flat.reshape(tensor.shape)


loaded = {name: tensor for file in sorted(Path(sys.argv[2]).glob("*.safetensors")) for name, tensor in load_file(file).items()}
with connect(sys.argv[1], timeout=90, delta=makes_deltas) as fleet:
    for line in sys.stdin:
        wanted = json.loads(line)
        scale, share = wanted.pop("scale"), wanted.pop("changed", 0.0)
        tensors = {name: change((tensor.float() * scale).to(tensor.dtype), share) for name, tensor in loaded.items()}
        try:
            result = fleet.push(tensors, **wanted)
        except PushFailed as error:
            answer: dict[str, object] = {"phase": error.phase, "message": str(error)}
        else:
            answer = {"version": result.version, "state": result.state, "world_size": result.world_size, "fenced": result.fenced}
            answer |= {"bytes": result.bytes, "transferred": result.transferred} if makes_deltas else {}
        print(json.dumps(answer), flush=True)
