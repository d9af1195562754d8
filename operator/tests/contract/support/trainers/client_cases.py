"""Cases of the client library that need torch: run by the engine environment's Python, one case per process.

client_cases.py CASE URL MODEL [ARGUMENT …]      prints one JSON object
"""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sglang_rollout.trainer import Fleet, GroupFailed, PushFailed, Snapshots, connect
from sglang_rollout.trainer.push import Push, PushOptions
from sglang_rollout.trainer.tensors import Source

PROMPT = [11, 12, 13, 14]
TOKENS = 24


def perturbed(model: Any, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return dict(model.state_dict())


def greedy(model: Any) -> list[int]:
    with torch.no_grad():
        done = model.generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    tokens: list[int] = done[0, len(PROMPT) :].tolist()
    return tokens


def said(fleet: Fleet) -> tuple[str, list[int]]:
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    (sample,) = fleet.generate(input_ids=[PROMPT], sampling_params=params, timeout=60)
    return sample.weight_version, sample.output_ids


def buckets(fleet: Fleet, model: Any) -> dict[str, Any]:
    """Push with one tensor per bucket, with several, with all in one, and with mixed types. The engines hold the same policy each time."""
    rows = []
    for number, size in enumerate((1, 1 << 20, 1 << 28), 1):
        result = fleet.push(iter(perturbed(model, number).items()), version=number, bucket_bytes=size)
        rows.append({"buckets": result.buckets, "bytes": result.bytes, "equal": said(fleet) == (str(number), greedy(model))})
    half = {name: tensor.bfloat16() if "norm" in name else tensor for name, tensor in perturbed(model, 9).items()}
    model.load_state_dict({name: tensor.float() for name, tensor in half.items()})
    result = fleet.push(half, version=4)
    rows.append({"buckets": result.buckets, "bytes": result.bytes, "equal": said(fleet) == ("4", greedy(model))})
    return {"rows": rows}


def wrong_shape(fleet: Fleet, model: Any) -> dict[str, Any]:
    """Push a tensor with a wrong shape: the client refuses it; unchecked, the push fails and the next complete push heals the fleet."""
    wrong = {"lm_head.weight": torch.zeros(5, 5)}
    refused, failed = "", ""
    try:
        fleet.push(iter(wrong.items()), version=1)
    except PushFailed as error:
        refused = str(error)
    untouched = fleet.document().serving
    started = time.monotonic()
    try:
        fleet.push(wrong, version=1, check_model=False)
    except PushFailed as error:
        failed = f"{error.phase}: {error}"
    seconds = time.monotonic() - started
    serving = fleet.document().serving
    fleet.push(perturbed(model, 3), version=2)
    healed = said(fleet) == ("2", greedy(model))
    return {"refused": refused, "untouched": untouched, "failed": failed, "seconds": seconds, "serving": serving, "healed": healed}


def wrong_world(fleet: Fleet, model: Any) -> dict[str, Any]:
    """Open a process group that the fleet refuses. It fails at once with the fleet's reason, although rank 0 waits for peers."""
    document = fleet.document()
    fleet._groups._read_document = lambda: document.model_copy(update={"world_size": document.world_size + 1})
    started = time.monotonic()
    try:
        fleet.open_group(timeout=60)
    except GroupFailed as error:
        return {"failed": str(error), "seconds": time.monotonic() - started, "world_size": document.world_size}
    return {"failed": ""}


def lost_group(fleet: Fleet, model: Any) -> dict[str, Any]:
    """Push on a process group that was closed: the push fails in time, and the next push opens a new process group."""
    group = fleet.open_group()
    fleet._http.post("/destroy_weights_update_group", {"group_name": group.name}, timeout=30)
    started = time.monotonic()
    failed = ""
    try:
        Push(fleet._http, group, PushOptions("1", bucket_bytes=1 << 28, timeout=60)).run(Source(model.state_dict()))
    except PushFailed as error:
        failed = str(error)
    seconds = time.monotonic() - started
    result = fleet.push(perturbed(model, 5), version=2)
    return {"failed": failed, "seconds": seconds, "pushed": result.version, "equal": said(fleet) == ("2", greedy(model))}


def checksums(fleet: Fleet, model: Any) -> dict[str, Any]:
    """Push with wrong checksums, and push the same weights again with the checksums that the fleet reported."""
    state = perturbed(model, 7)
    try:
        fleet.push(state, version=1, checksums={1: ["0" * 64]})
    except PushFailed as error:
        failed = str(error)
    found = re.findall(r"rank 0 has (\w{64}), not 0{64}", failed)
    result = fleet.push(state, version=2, checksums={1: found})
    return {"failed": failed, "pushed": result.version, "equal": said(fleet) == ("2", greedy(model))}


def snapshots(fleet: Fleet, model: Any, path: str, directory: str) -> dict[str, Any]:
    """Change weights right after the push. The snapshot has the pushed weights, in two files of safetensors."""
    fleet.snapshots = Snapshots(directory, model=path, keep=2, shard_bytes=2 << 20)
    labels = []
    for number in (1, 2, 3):
        state = perturbed(model, number)
        pushed = {name: tensor.clone() for name, tensor in state.items()}
        result = fleet.push(state, version=f"step {number}")
        tokens = greedy(model)
        for tensor in state.values():
            tensor.add_(1.0)  # as an optimizer does
        assert result.snapshot is not None
        made = result.snapshot.result(60)
        model.load_state_dict(pushed)
        labels.append(made.manifest.label)
    loaded = {name: tensor for file in made.path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    same = loaded.keys() == pushed.keys() and all(torch.equal(loaded[name], pushed[name]) for name in pushed)
    return {"labels": labels, "same": same, "path": str(made.path), "tokens": tokens, "files": len(list(made.path.glob("*.safetensors")))}


def main(case: str, url: str, path: str, *more: str) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with connect(url, timeout=60) as fleet:
        print(json.dumps(globals()[case](fleet, model, *more)))


if __name__ == "__main__":
    main(*sys.argv[1:])
