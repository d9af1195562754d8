"""A trainer that pushes on command; run by the engine environment's Python, because it needs torch.

    trainer.py URL      reads a label per line ("late LABEL": named at the end), pushes other weights under it, answers with a line of JSON

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
from sglang_rollout.trainer import fleet as module
from sglang_rollout.trainer.errors import FleetError
from sglang_rollout.trainer.push import Push
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


class NamedLate(Push):
    """Names the version by ``/update_weight_version``, as several trainers do: engines learn it only when the fleet commits."""

    def _body(self, bucket: Any) -> dict[str, Any]:
        body = super()._body(bucket)
        body.pop("weight_version", None)
        return body

    def _call(self, phase: str, path: str, body: dict[str, Any]) -> None:
        if phase == "end":
            super()._call("name", "/update_weight_version", {"new_version": self._version})
        super()._call(phase, path, body)


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
            manner, _, label = line.strip().rpartition(" ")
            setattr(module, "Push", NamedLate if manner == "late" else Push)  # noqa: B010 - what push() makes
            print(json.dumps(push(fleet, label)), flush=True)


if __name__ == "__main__":
    main()
