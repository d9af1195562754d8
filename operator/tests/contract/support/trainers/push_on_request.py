"""A trainer that pushes once per line of its input, while its fleet changes. Run by the engine environment's Python.

push_on_request.py URL      reads lines with a factor of the model's tensors, and prints one JSON object per line; repeats a push once
"""

from __future__ import annotations

import json
import sys

import torch

from sglang_rollout.testing import StandIn
from sglang_rollout.trainer import connect

torch.set_num_threads(1)
with StandIn() as stand_in:
    tensors = dict(stand_in.state_dict())
with connect(sys.argv[1], timeout=60) as fleet:
    for version, line in enumerate(sys.stdin, 1):
        result = fleet.push({name: tensor * int(line) for name, tensor in tensors.items()}, version=version, retries=1)
        members = [member.name for member in fleet.document().members if member.rank_offset is not None]
        print(json.dumps({"version": result.version, "world_size": result.world_size, "members": members}), flush=True)
