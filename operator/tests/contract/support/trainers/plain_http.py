"""A trainer without our client library: rank 0 of a gloo process group, and plain HTTP. Run by the engine environment's Python.

usage: plain_http.py URL MODEL GROUP SEED session|plain|die [VERSION]      prints one line of JSON
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import urllib.error
import urllib.request
from datetime import timedelta

import torch
from safetensors.torch import load_file

from sglang_rollout.testing.trainer_group import broadcast, choose_port, open_group

url, model, group, seed, manner = sys.argv[1:6]
version = sys.argv[6] if len(sys.argv) > 6 else None
LIMIT = timedelta(seconds=60)


def post(path: str, body: dict[str, object]) -> dict[str, object]:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return {**json.loads(reply.read()), "code": reply.status}
    except urllib.error.HTTPError as error:
        return {**json.loads(error.read()), "code": error.code, "reason": error.reason}


def in_thread(path: str, body: dict[str, object]) -> tuple[threading.Thread, list[dict[str, object]]]:
    found: list[dict[str, object]] = []
    thread = threading.Thread(target=lambda: found.append(post(path, body)))
    thread.start()
    return thread, found


with urllib.request.urlopen(f"{url}/get_world_size", timeout=10) as reply:
    world = json.loads(reply.read())["world_size"] + 1
port = choose_port()
joining, joined = in_thread(
    "/init_weights_update_group",
    {"master_address": "127.0.0.1", "master_port": str(port), "rank_offset": 1, "world_size": world, "group_name": group},
)
gloo = open_group(host="127.0.0.1", port=port, group=group, world_size=world, timeout=LIMIT)
joining.join()

torch.manual_seed(int(seed))
tensors = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in load_file(f"{model}/model.safetensors").items()}
replies = [joined[0]]
if manner == "plain":
    replies.append(post("/pause_generation", {"mode": "retract"}))
else:
    replies.append(post("/begin_weight_update", {}))
for name, tensor in tensors.items():
    body: dict[str, object] = {
        "names": [name], "dtypes": [str(tensor.dtype).removeprefix("torch.")], "shapes": [list(tensor.shape)],
        "group_name": group, "flush_cache": False, "weight_version": version,
    }  # fmt: skip
    thread, found = in_thread("/update_weights_from_distributed", body)
    broadcast(gloo, [tensor])
    thread.join()
    replies.append(found[0])
    if manner == "die":
        os.kill(os.getpid(), signal.SIGKILL)
replies.append(post("/continue_generation" if manner == "plain" else "/end_weight_update", {}))
refused = [reply for reply in replies if reply["code"] != 200]
print(json.dumps({"statuses": [reply["code"] for reply in replies], "refused": refused, "last": replies[-1]}))
