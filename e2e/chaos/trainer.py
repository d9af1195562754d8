"""A trainer that pushes on command; run by the engine environment's Python, because it needs torch.

    trainer.py URL [SNAPSHOTS]      reads lines, pushes other weights for each, answers with lines of JSON

    LABEL           push
    late LABEL      push, and name the version at the end of the update
    keep LABEL      push, and write a snapshot into the folder SNAPSHOTS
    stall LABEL     push, but never take part in the broadcast that the engines wait for; says {"stalled": true} then

The answer: ``label``, ``ok``, ``seconds``, ``error``, ``fenced``. Before it: ``policy``, the digest of these weights, from
which follows what a stand-in generates with them.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch

from sglang_rollout.trainer import Fleet, Snapshots, connect
from sglang_rollout.trainer import fleet as module
from sglang_rollout.trainer.errors import FleetError
from sglang_rollout.trainer.group import Group
from sglang_rollout.trainer.push import Push
from sglang_rollout.trainer.testing import StandIn
from sglang_rollout.trainer.testing.weights import held_from, policy_digest

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

    def _call(self, phase: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if phase == "end":
            super()._call("name", "/update_weight_version", {"new_version": self._version})
        return super()._call(phase, path, body)


def stall(self: Group, buffer: Any, *, timeout: float) -> None:
    """In the place of the broadcast: a trainer whose GPU never gets there. The engines wait in it for us."""
    print(json.dumps({"stalled": True}), flush=True)
    time.sleep(timeout)


def push(fleet: Fleet, label: str, manner: str) -> dict[str, Any]:
    """Push, and say how it went. Says first which weights these are: it may not come back."""
    weights = policy(label)
    print(json.dumps({"label": label, "policy": policy_digest(held_from(weights)).hex()}), flush=True)
    began = time.monotonic()
    error, fenced = "", {}
    keep = True if manner == "keep" else None
    try:
        result = fleet.push(weights, version=label, timeout=60, snapshot=keep)
        fenced = result.fenced
        if result.snapshot is not None:
            result.snapshot.result(60)
    except (FleetError, OSError) as failed:
        error = str(failed)
    return {"label": label, "ok": not error, "seconds": round(time.monotonic() - began, 2), "error": error, "fenced": fenced}


def main() -> None:
    """Serve until the input ends."""
    url, *rest = sys.argv[1:]
    # Not every push: only those that ask for it.
    snapshots = Snapshots(rest[0], model="/models/tiny", every=1_000_000) if rest else None
    with connect(url, timeout=60, snapshots=snapshots) as fleet:
        print(json.dumps({"ready": True, "pid": os.getpid(), "policy": policy_digest(held_from(BASE)).hex()}), flush=True)
        for line in sys.stdin:
            manner, _, label = line.strip().rpartition(" ")
            setattr(module, "Push", NamedLate if manner == "late" else Push)  # noqa: B010 - what push() makes
            with patch.object(Group, "broadcast", stall) if manner == "stall" else nullcontext():
                print(json.dumps(push(fleet, label, manner)), flush=True)


if __name__ == "__main__":
    main()
