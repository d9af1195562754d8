"""Runs in a pod: a trainer without our client library, with the calls of slime. It opens one process group, and never another.

usage: python -c TEXT-OF-THIS-FILE URL MODEL

MODEL: a folder, or ``stand-in`` for the small model of a stand-in. It talks as ``e2e.chaos.trainer`` does: it reads labels, one a line, and
pushes other weights for each. ``policy`` is the list of tokens that the weights generate, and ``error`` has all answers that were not 200.
"""

import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from safetensors.torch import load_file

from sglang_rollout.testing.trainer_group import broadcast, choose_port, open_group

PROMPT, TOKENS = [4, 5, 6], 6
GROUP = "slime-pp_0"
SPREAD = 0.05
LIMIT = timedelta(seconds=120)
BUCKETS = 3
url, model = sys.argv[1:3]
pool = ThreadPoolExecutor(1)
refused: list[str] = []
Weights = dict[str, torch.Tensor]


def call(method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Send one call, and keep an answer that is not 200."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            text = reply.read().decode()
    except urllib.error.HTTPError as error:
        refused.append(f"{path}: {error.code} {error.read().decode()}")
        return {}
    return dict(json.loads(text)) if text.startswith("{") else {}


def read_model() -> tuple[Weights, Callable[[Weights], list[int]]]:
    """Return the weights that engines start with, and the function that returns the tokens of other weights."""
    if model != "stand-in":
        from transformers import AutoModelForCausalLM

        module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

        def generate(weights: Weights) -> list[int]:
            module.load_state_dict(weights, strict=False)
            ids = torch.tensor([PROMPT])
            done = module.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
            return list(done[0, len(PROMPT) :].tolist())

        return load_file(f"{model}/model.safetensors"), generate

    from sglang_rollout.testing import StandIn, expected_tokens
    from sglang_rollout.testing.policy import held_from

    with StandIn() as stand_in:
        base = stand_in.tensors()
    made = {name: torch.zeros(held.shape, dtype=getattr(torch, held.dtype)) for name, held in base.items()}
    return made, lambda weights: expected_tokens(held_from(weights), PROMPT, TOKENS)


def open_fleet_group() -> Any:
    """Open the process group as rank 0. The world size comes from the server, as for any SGLang server."""
    world = 1 + int(call("GET", "/get_server_info")["num_gpus"])
    address = socket.gethostbyname(socket.gethostname())
    port = choose_port(address)
    body = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": world, "group_name": GROUP}
    asked = pool.submit(call, "POST", "/init_weights_update_group", body | {"backend": "gloo"})
    joined = open_group(host=address, port=port, group=GROUP, world_size=world, timeout=LIMIT)
    asked.result()
    return joined


def push(group: Any, weights: Weights, label: str) -> None:
    """Send one version: pause, flush, buckets, continue."""
    call("POST", "/pause_generation", {})
    call("GET", "/flush_cache")
    names = list(weights)
    size = -(-len(names) // BUCKETS)
    for bucket in (names[at : at + size] for at in range(0, len(names), size)):
        body = {
            "names": bucket,
            "dtypes": [str(weights[name].dtype).removeprefix("torch.") for name in bucket],
            "shapes": [list(weights[name].shape) for name in bucket],
            "group_name": GROUP,
            "flush_cache": False,
            "weight_version": label,
        }
        asked = pool.submit(call, "POST", "/update_weights_from_distributed", body)
        broadcast(group, [weights[name] for name in bucket])
        asked.result()
    call("POST", "/continue_generation", {})


def weights_of(label: str, base: Weights) -> Weights:
    """Return the weights of a label."""
    generator = torch.Generator().manual_seed(zlib.crc32(label.encode()))
    noise = {name: SPREAD * torch.randn(tensor.shape, generator=generator) for name, tensor in base.items()}
    return {name: (tensor.float() + noise[name]).to(tensor.dtype) for name, tensor in base.items()}


def answer(**fields: Any) -> None:
    """Print one line of JSON."""
    print(json.dumps(fields), flush=True)


def main() -> None:
    """Serve until the input ends."""
    torch.set_num_threads(1)
    base, generate = read_model()
    group = open_fleet_group()
    if refused:
        sys.exit(f"the process group was not opened: {refused}")
    answer(ready=True, pid=os.getpid(), policy=json.dumps(generate(base)))
    for line in sys.stdin:
        label, began = line.strip(), time.monotonic()
        weights = weights_of(label, base)
        answer(label=label, policy=json.dumps(generate(weights)))
        refused.clear()
        push(group, weights, label)
        answer(label=label, ok=not refused, seconds=round(time.monotonic() - began, 2), error="; ".join(refused))


main()
