"""A trainer that pushes on command; run by the engine environment's Python, because it needs torch.

    trainer.py URL      reads one label per line, pushes other weights under each, answers each with one line of JSON

The answer: ``label``, ``ok``, ``seconds``, ``error``, and ``tokens``, which a stand-in with these weights generates.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from typing import Any

import torch

from e2e.chaos.trainer_protocol import PROMPT, TOKENS
from sglang_rollout.trainer import Fleet, connect
from sglang_rollout.trainer.errors import FleetError
from sglang_rollout.trainer.testing import StandIn, expected_tokens

with StandIn() as _stand_in:
    BASE = _stand_in.tensors()


def policy(label: str) -> dict[str, torch.Tensor]:
    """Weights that belong to a label: the same in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(label.encode()))
    made = {}
    for name, held in BASE.items():
        dtype = getattr(torch, held.dtype)
        made[name] = torch.randn(held.shape, generator=generator).to(dtype)
    return made


def push(fleet: Fleet, label: str) -> dict[str, Any]:
    """Push, and say how it went. Says first what engines with these weights generate: it may not come back."""
    weights = policy(label)
    print(json.dumps({"label": label, "tokens": expected_tokens(weights, PROMPT, TOKENS)}), flush=True)
    began = time.monotonic()
    error = ""
    try:
        fleet.push(weights, version=label, timeout=60)
    except FleetError as failed:
        error = str(failed)
    return {"label": label, "ok": not error, "seconds": round(time.monotonic() - began, 2), "error": error}


def main() -> None:
    """Serve until the input ends."""
    with connect(sys.argv[1], timeout=60) as fleet:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            print(json.dumps(push(fleet, line.strip())), flush=True)


if __name__ == "__main__":
    main()
