"""A trainer with sharded weights (FSDP2), as torchrun starts it: every rank runs this file.

torchrun … sharded.py URL MODEL CASE …      each rank prints one line: a JSON object with its rank and the result of each case
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from sglang_rollout.trainer import Fleet, PushFailed, Snapshots, connect
from sglang_rollout.trainer.calls import Http

PROMPT = [11, 12, 13, 14]
TOKENS = 24
Seen = dict[str, Any]


def policy(path: str, seed: int) -> Any:
    """Return the model with other weights, which are the same on every rank."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def greedy(model: Any) -> list[int]:
    with torch.no_grad():
        done = model.generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    tokens: list[int] = done[0, len(PROMPT) :].tolist()
    return tokens


def wrapped(model: Any) -> Any:
    """Shard the model over all ranks, with the names of activation checkpointing and torch.compile."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if world == 4 else init_device_mesh("cpu", (world,))
    layers = model.model.layers
    for index in range(len(layers)):
        layers[index] = checkpoint_wrapper(layers[index])
        fully_shard(layers[index], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return torch.compile(model)


def said(fleet: Fleet) -> list[Any]:
    """Return label and greedy tokens of the engine."""
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    (sample,) = fleet.generate(input_ids=[PROMPT], sampling_params=params, timeout=60)
    return [sample.weight_version, sample.output_ids]


def failed(push: Callable[[], Any]) -> str:
    """Return the error of a push, which must be the same on every rank."""
    try:
        push()
    except PushFailed as error:
        return str(error)
    return ""


def sharded(fleet: Fleet, path: str) -> Seen:
    """Push a state dict, then ``named_parameters()`` with ``specs``, in many buckets, and compare a snapshot."""
    if dist.get_rank() == 0:
        fleet.snapshots = Snapshots(os.environ["SNAPSHOTS"], model=path)
    rows = []
    for seed in (1, 2):
        model = policy(path, seed)
        expected, full = greedy(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
        shards = wrapped(model)
        state = shards.state_dict()
        assert all(isinstance(tensor, DTensor) for tensor in state.values())
        assert any("_orig_mod." in name and "_checkpoint_wrapped_module." in name for name, _ in shards.named_parameters())
        parameters = list(shards.named_parameters())
        specs = [(name, tensor.shape, tensor.dtype) for name, tensor in parameters]
        named = [state, iter(parameters)][seed - 1]
        result = fleet.push(named, version=seed, bucket_bytes=300_000, specs=specs if seed == 2 else None, snapshot=True)
        dist.barrier()
        row = {"version": result.version, "buckets": result.buckets, "equal": said(fleet) == [str(seed), expected]}
        if dist.get_rank() == 0:
            assert result.snapshot is not None
            held = load_file(result.snapshot.result(60).path / "model.safetensors")
            row["snapshot"] = held.keys() == full.keys() and all(torch.equal(held[name], full[name]) for name in full)
        rows.append(row)
    fleet.snapshots = None
    return {"rows": rows, "parameters": len(specs)}


def bad(fleet: Fleet, path: str) -> Seen:
    """Push weights that cannot be sent. Every rank gets the reason, and the fleet receives no call."""
    state = wrapped(policy(path, 3)).state_dict()
    first, *_, last = state
    rank, world = dist.get_rank(), dist.get_world_size()
    # Each rank is in one row and in one column of this mesh, so neither of the two meshes contains the other.
    square = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("column", "row"))
    row, column = (distribute_tensor(torch.zeros(4), square[name], [Replicate()]) for name in ("row", "column"))
    calls: list[str] = []
    post = Http.post

    def noted(self: Http, path: str, body: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        calls.append(path)
        return post(self, path, body, timeout=timeout)

    Http.post = noted  # type: ignore[method-assign]
    fleet.close_group()
    dist.barrier()
    calls.clear()
    before = fleet.document().model_dump()
    cases: dict[str, Any] = {
        "value": state | {last: "a string"},
        "meta": state | {last: torch.zeros(4, device="meta")},
        "type": state | {last: torch.zeros(4, dtype=torch.complex64)},
        "twice": state | {f"_orig_mod.{first}": state[first]},
        "unknown": state | {"model.nothing.weight": state[first]},
        "shape": state | {last: distribute_tensor(torch.zeros(5, 5), state[last].device_mesh, [Shard(0)] * state[last].device_mesh.ndim)},
        "rank 1": state | ({last: "a string"} if rank == 1 else {}),
        "order": dict(reversed(state.items())) if rank == 1 else state,
        "mesh": {"model.norm.weight": column, "lm_head.weight": row},
    }
    errors = {name: failed(partial(fleet.push, tensors, version=3, timeout=20)) for name, tensors in cases.items()}
    Http.post = post  # type: ignore[method-assign]
    return {"errors": errors, "calls": calls, "unchanged": fleet.document().model_dump() == before}


def stopped(fleet: Fleet, path: str) -> Seen:
    """Let the leader, a follower or the fleet fail during a push, or a rank not take part. Then push again."""
    model = policy(path, 4)
    expected = greedy(model)
    state = wrapped(model).state_dict()
    errors = {}

    def breaking(rank: int) -> Iterator[tuple[str, Any]]:
        for number, pair in enumerate(state.items()):
            if number == 3 and dist.get_rank() == rank:
                raise RuntimeError("out of memory")
            yield pair

    for name, rank in (("leader", 0), ("follower", 1)):
        errors[name] = failed(partial(fleet.push, breaking(rank), version=4, bucket_bytes=1, timeout=30))
    errors["fleet"] = failed(lambda: fleet.push(state, version=4, checksums={1: ["0" * 64]}, timeout=30))
    errors["absent"] = failed(lambda: fleet.push(state, version=4, timeout=1)) if dist.get_rank() == 0 else ""
    dist.barrier()
    result = fleet.push(state, version=5)
    return {"errors": errors, "healed": said(fleet) == ["5", expected], "version": result.version}


def main(url: str, path: str, *cases: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with connect(url, timeout=60) as fleet:
        line = json.dumps({"rank": dist.get_rank(), **{case: globals()[case](fleet, path) for case in cases}})
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
