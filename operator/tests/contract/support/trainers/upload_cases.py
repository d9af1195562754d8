"""Pushes of the client to a fleet with transport Staged; needs a Python with torch.

upload_cases.py CASE URL      prints one JSON object
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import torch

from sglang_rollout.trainer import Fleet, PushFailed, connect

SIZE = 3 << 20


def model(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    wide = torch.randn(1024, 3 * 1024)
    return {
        "wide": wide,
        "transposed": wide.t(),
        "half": torch.randn(SIZE).bfloat16(),
        "scalar": torch.tensor(2.5),
        "mask": torch.tensor([True, False, True]),
        "double": torch.randn(5, dtype=torch.float64),
    }


def digest(tensors: list[Any]) -> str:
    data = sha256()
    for tensor in tensors:
        data.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return data.hexdigest()


def described(result: Any) -> dict[str, Any]:
    return {"bytes": result.bytes, "shards": result.buckets, "state": result.state, "version": result.version, "world": result.world_size}


def push(fleet: Fleet) -> dict[str, Any]:
    state = model(1)
    names = list(state)
    # "double" is not aligned behind "mask", so it begins a shard.
    return {
        "digests": [digest([state[name] for name in names[:5]]), digest([state["double"]])],
        **described(fleet.push(state, version="one")),
    }


def iterator(fleet: Fleet) -> dict[str, Any]:
    state = model(2)
    specs = [(name, tensor.shape, tensor.dtype) for name, tensor in state.items()]
    result = fleet.push(iter(state.items()), version=2, specs=specs, wait="staged", bucket_bytes=1 << 20)
    return {"digests": [digest(list(state.values())[:5]), digest([state["double"]])], **described(result)}


def failing(fleet: Fleet) -> dict[str, Any]:
    state = model(3)
    specs = [(name, tensor.shape, tensor.dtype) for name, tensor in state.items()]

    def gather() -> Iterator[tuple[str, Any]]:
        yield "wide", state["wide"]
        raise RuntimeError("a rank of the trainer is gone")

    return refused(fleet, gather(), specs=specs)


def refused(fleet: Fleet, tensors: Any = None, **more: Any) -> dict[str, Any]:
    try:
        fleet.push(model(4) if tensors is None else tensors, version=4, timeout=20, **more)
    except PushFailed as error:
        return {"phase": error.phase, "message": str(error)}
    return {}


if __name__ == "__main__":
    torch.set_num_threads(1)
    case, url = sys.argv[1:]
    with connect(url, timeout=60) as fleet:
        print(json.dumps({"push": push, "iterator": iterator, "failing": failing, "refused": refused}[case](fleet)))
