"""A trainer that shares the engines' machine, as in verl's hybrid mode: it wakes each engine at that engine's own URL, pushes handles of
its tensors there, generates, and puts it to sleep again. It knows no token and no session.

usage: hybrid_trainer.py MODEL SEED VERSION PROMPT TOKENS FLEET-URL URL...     run by the engine's Python

Prints one line of JSON: the tokens that its own model generates, those of each engine and of the fleet, with the version that each said.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

folder, seed, version, prompt, tokens, fleet, *urls = sys.argv[1:]
LIMIT = 120
# torch keeps a process for the handles, which lives as long as an engine has any open. It must not keep our caller's pipes.
sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w") for number in (1, 2))
with open(os.devnull, "w") as nowhere:
    for number in (1, 2):
        os.dup2(nowhere.fileno(), number)
BUCKETS = 3
# A handle is the name of a file in shared memory: another process, which is no child, can open it.
torch.multiprocessing.set_sharing_strategy("file_system")
torch.set_num_threads(1)
torch.manual_seed(int(seed))
weights = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in load_file(f"{folder}/model.safetensors").items()}


def handles(part: list[tuple[str, torch.Tensor]]) -> str:
    """What SGLang's MultiprocessingSerializer makes of tensors. Of each engine its own: whoever opens a handle uses it up."""
    out = io.BytesIO()
    ForkingPickler(out).dump(part)
    return base64.b64encode(out.getvalue()).decode()


def call(url: str, body: dict[str, object] | None, patience: float = 0.0) -> tuple[bytes, str | None]:
    """The answer's body and version; anything but 200 ends the trainer. ``patience``: seconds in which a 503 is tried again, because
    the router hears of an open gate a moment later."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=LIMIT) as reply:
            return reply.read(), reply.headers.get("X-Weight-Version")
    except urllib.error.HTTPError as error:
        if error.code == 503 and patience > 0:
            time.sleep(0.5)
            return call(url, body, patience - 0.5)
        sys.exit(f"{url}: {error.code} {error.read()[:2000].decode()}")


def push(url: str) -> None:
    """The calls of one step, in verl's order."""
    call(f"{url}/resume_memory_occupation", {"tags": ["weights"]})
    named = list(weights.items())
    for start in range(BUCKETS):
        body = {"serialized_named_tensors": [handles(named[start::BUCKETS])], "load_format": None, "flush_cache": False}
        call(f"{url}/update_weights_from_tensor", body | {"weight_version": version})
    call(f"{url}/resume_memory_occupation", {"tags": ["kv_cache"]})
    call(f"{url}/flush_cache", None)


def generated(url: str) -> tuple[list[int], str | None]:
    """Greedy tokens of an engine, or of the fleet."""
    sampling = {"temperature": 0, "max_new_tokens": int(tokens), "ignore_eos": True}
    asked: dict[str, object] = {"input_ids": json.loads(prompt), "sampling_params": sampling}
    body, said = call(f"{url}/generate", asked, patience=10.0 if url == fleet else 0.0)
    return list(json.loads(body)["output_ids"]), said


with ThreadPoolExecutor(len(urls)) as pool:
    list(pool.map(push, urls))
    answers = dict(zip([*urls, fleet], pool.map(generated, [*urls, fleet]), strict=True))
    call(f"{urls[0]}/abort_request", {"rid": "", "abort_all": True})
    list(pool.map(lambda url: call(f"{url}/release_memory_occupation", {"tags": ["kv_cache", "weights"]}), urls))

model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
model.load_state_dict(weights, strict=False)
model.tie_weights()
given = torch.tensor([json.loads(prompt)])
with torch.no_grad():
    done = model.generate(given, max_new_tokens=int(tokens), do_sample=False, eos_token_id=None, pad_token_id=0)
print(json.dumps({"expected": done[0, given.shape[1] :].tolist(), "answers": answers}))
