"""Runs in a pod: push the tiny model plus seeded noise, then ask every engine directly. Prints one line of JSON.

usage: python - URL VERSION SEED
"""

import json
import sys

import requests
import torch
from safetensors.torch import load_file

from sglang_rollout.trainer import connect

url, version, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(seed)
weights = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in load_file("/models/tiny/model.safetensors").items()}

with connect(url) as fleet:
    result = fleet.push(weights.items(), version=version)
    answers = {}
    for member in fleet.document().members:
        reply = requests.post(
            f"{member.url}/generate",
            json={"input_ids": [11, 22, 33], "sampling_params": {"temperature": 0, "max_new_tokens": 8}},
            timeout=60,
        ).json()
        answers[member.name] = {"ids": reply["output_ids"], "version": reply["meta_info"]["weight_version"]}
print(json.dumps({"version": version, "epoch": result.epoch, "engines": answers}))
