"""A trainer on the engines' machine, as in verl's hybrid mode.

It wakes each engine at the engine's own URL, pushes handles of its tensors there, generates, and puts the engine to sleep again.
It uses no token and no session.

usage: hybrid_trainer.py MODEL SEED VERSION PROMPT TOKENS FLEET-URL URL...     run by the engine's Python

Prints one line of JSON: the tokens that its own model generates, and the tokens and version of each engine and of the fleet.
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
# torch starts a process for the handles, which runs as long as an engine has one open. It must not keep our caller's pipes.
sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w") for number in (1, 2))
with open(os.devnull, "w") as nowhere:
    for number in (1, 2):
        os.dup2(nowhere.fileno(), number)
BUCKETS = 3
# A handle is the name of a file in shared memory, so that a process that is not a child can open it.
torch.multiprocessing.set_sharing_strategy("file_system")
torch.set_num_threads(1)
torch.manual_seed(int(seed))
weights = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in load_file(f"{folder}/model.safetensors").items()}


def handles(part: list[tuple[str, torch.Tensor]]) -> str:
    """Serialize tensors as SGLang's MultiprocessingSerializer does. A handle can be opened once, so each engine needs its own."""
    out = io.BytesIO()
    ForkingPickler(out).dump(part)
    return base64.b64encode(out.getvalue()).decode()


def call(url: str, body: dict[str, object] | None, patience: float = 0.0) -> tuple[bytes, str | None]:
    """Return the body and the version of an answer. Any status but 200 ends the trainer.

    Args:
        url: Address of the call.
        body: Body of a POST request; None sends a GET request.
        patience: Seconds in which a call is repeated after a 503, because the router learns of an open gate a moment later.
    """
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
    """Send the calls of one step, in verl's order."""
    call(f"{url}/resume_memory_occupation", {"tags": ["weights"]})
    named = list(weights.items())
    for start in range(BUCKETS):
        body = {"serialized_named_tensors": [handles(named[start::BUCKETS])], "load_format": None, "flush_cache": False}
        call(f"{url}/update_weights_from_tensor", body | {"weight_version": version})
    call(f"{url}/resume_memory_occupation", {"tags": ["kv_cache"]})
    call(f"{url}/flush_cache", None)


def generated(url: str) -> tuple[list[int], str | None]:
    """Return the greedy tokens and the version of an engine, or of the fleet."""
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
