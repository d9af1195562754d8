"""``reference.py MODEL``: generate with plain transformers and the weights of a label; run by the engine environment's Python.

Reads lines ``{"label": …, "before": [tokens], "count": n}``. Answers each line with the n tokens that follow the prompt and ``before``.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM

from e2e.chaos.tokens import BASE, PROMPT
from e2e.chaos.trainer import policy


def main() -> None:
    """Serve until the input ends."""
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    shapes = {name: (tuple(tensor.shape), torch.float32) for name, tensor in model.state_dict().items()}
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    held = BASE
    for line in sys.stdin:
        request = json.loads(line)
        if request["label"] != held:
            held = request["label"]
            model.load_state_dict(base if held == BASE else policy(held, shapes))
        tokens = [*PROMPT, *request["before"]]
        with torch.no_grad():
            options = {"max_new_tokens": request["count"], "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            done = model.generate(torch.tensor([tokens]), **options)
        print(json.dumps(done[0, len(tokens) :].tolist()), flush=True)


if __name__ == "__main__":
    main()
