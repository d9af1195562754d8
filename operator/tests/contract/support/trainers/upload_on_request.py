"""A trainer that uploads to a fleet with transport Staged, once per line of its input; needs a Python with torch.

upload_on_request.py URL MODEL
{"scale": X, "version": TEXT, "wait": "staged" | "committed"}     -> the result of the push, or {"phase", "message"} of its failure
"""

from __future__ import annotations

import json
import sys

import torch
from safetensors.torch import load_file

from sglang_rollout.trainer import PushFailed, connect

torch.set_num_threads(1)
loaded = load_file(f"{sys.argv[2]}/model.safetensors")
with connect(sys.argv[1], timeout=90) as fleet:
    for line in sys.stdin:
        wanted = json.loads(line)
        scale = wanted.pop("scale")
        tensors = {name: (tensor.float() * scale).to(tensor.dtype) for name, tensor in loaded.items()}
        try:
            result = fleet.push(tensors, **wanted)
        except PushFailed as error:
            answer: dict[str, object] = {"phase": error.phase, "message": str(error)}
        else:
            answer = {"version": result.version, "state": result.state, "world_size": result.world_size, "fenced": result.fenced}
        print(json.dumps(answer), flush=True)
