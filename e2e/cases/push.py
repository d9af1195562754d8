"""Runs in a pod: push the tiny model plus seeded noise (none for seed 0), then ask each engine that serves. Prints one line of JSON.

usage: python - URL VERSION SEED [stall | pause | unchecked | ""] [MODEL] [PREFIX]

PREFIX: prepended to the name of each tensor.
unchecked: push with check_model=False.
stall: print {"pid": …} instead of sending the tensors that the engines wait for.
pause: open a process group, pause the fleet, print {"pid": …}, and wait.
"""

import json
import os
import sys
import time

import requests
import torch
from safetensors.torch import load_file

from sglang_rollout.trainer import connect
from sglang_rollout.trainer.process_group import ProcessGroup

url, version, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
manner = sys.argv[4] if len(sys.argv) > 4 else ""


def stop(*_: object, **__: object) -> None:
    """Print the process ID and wait."""
    print(json.dumps({"pid": os.getpid()}), flush=True)
    time.sleep(600)


MODEL = sys.argv[5] if len(sys.argv) > 5 else "/models/tiny"
torch.manual_seed(seed)
weights = load_file(f"{MODEL}/model.safetensors")
prefix = sys.argv[6] if len(sys.argv) > 6 else ""
if seed:
    weights = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in weights.items()}

if manner == "stall":
    ProcessGroup.broadcast = stop  # type: ignore[method-assign]

with connect(url) as fleet:
    if manner == "pause":
        fleet.open_group()
        requests.post(f"{url}/pause_generation", json={"mode": "retract"}, timeout=30).raise_for_status()
        stop()
    named = {prefix + name: tensor for name, tensor in weights.items()}
    result = fleet.push(named, version=version, check_model=manner != "unchecked")
    answers = {}
    for member in (member for member in fleet.document().members if member.gate_open):
        reply = requests.post(
            f"{member.url}/generate",
            json={"input_ids": [11, 22, 33], "sampling_params": {"temperature": 0, "max_new_tokens": 8}},
            timeout=60,
        ).json()
        answers[member.name] = {"ids": reply["output_ids"], "version": reply["meta_info"]["weight_version"]}
print(json.dumps({"version": version, "epoch": result.epoch, "unchecked": result.unchecked, "engines": answers}))
