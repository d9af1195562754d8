"""A trainer on the engines' machine, as verl's hybrid mode: it pushes handles of its tensors to each engine's own URL, without a token.

usage: tensors_trainer.py MODEL SEED VERSION PROMPT TOKENS URL...     run by the engine's Python; prints the tokens that it would generate
"""

from __future__ import annotations

import base64
import io
import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

folder, seed, version, prompt, tokens, *urls = sys.argv[1:]
LIMIT = 120
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


def call(url: str, body: dict[str, object] | None) -> None:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=LIMIT) as reply:
        reply.read()  # anything but 200 has been raised


def push(url: str) -> None:
    """verl opens no session."""
    named = list(weights.items())
    for start in range(BUCKETS):
        body = {"serialized_named_tensors": [handles(named[start::BUCKETS])], "load_format": None, "flush_cache": False}
        call(f"{url}/update_weights_from_tensor", body | {"weight_version": version})
    call(f"{url}/flush_cache", None)


with ThreadPoolExecutor(len(urls)) as pool:
    list(pool.map(push, urls))

model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
model.load_state_dict(weights, strict=False)
model.tie_weights()
given = torch.tensor([json.loads(prompt)])
with torch.no_grad():
    done = model.generate(given, max_new_tokens=int(tokens), do_sample=False, eos_token_id=None, pad_token_id=0)
print(json.dumps(done[0, given.shape[1] :].tolist()))
