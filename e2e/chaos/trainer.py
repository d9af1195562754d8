"""A trainer that pushes on command; run by the engine environment's Python, because it needs torch.

    trainer.py URL [SNAPSHOTS] [--model FOLDER]      reads lines, pushes other weights for each line, and answers with lines of JSON

The weights have the names and shapes of the stand-in's small model, or of the model in FOLDER.

    LABEL           push
    late LABEL      push, and name the version at the end of the update
    keep LABEL      push, and write a snapshot into the folder SNAPSHOTS
    stall LABEL     push, but never take part in the broadcast that the engines wait for; prints {"stalled": true} first

For a fleet with transport Staged, these words may be combined:

    group LABEL     push through a process group, which is closed afterwards, not as an upload
    hold LABEL      push, and wait before the last third of the tensors
    paused LABEL    pause the fleet before the push, and resume the fleet afterwards

The answer has ``label``, ``ok``, ``seconds``, ``error`` and ``fenced``. A line before it has ``policy``, the digest of the weights, which
determines the tokens of a stand-in.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from sglang_rollout.testing import StandIn
from sglang_rollout.testing.policy import held_from, policy_digest
from sglang_rollout.trainer import Fleet, PushResult, Snapshots, connect, upload
from sglang_rollout.trainer import fleet as module
from sglang_rollout.trainer.calls import Http
from sglang_rollout.trainer.errors import FleetError
from sglang_rollout.trainer.process_group import ProcessGroup
from sglang_rollout.trainer.push import Push

SPREAD = 0.1
"""Standard deviation of the weights. With 1, two implementations of a real model generate other tokens because of rounding."""
HOLD_SECONDS = 3.0
"""Time for which a push waits between its tensors."""
STEP_SECONDS = 60.0
"""Timeout of each step of a push."""
STAGED = {"group", "hold", "paused"}
"""Words for a fleet with transport Staged."""
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def policy(label: str, shapes: Shapes) -> dict[str, torch.Tensor]:
    """Return the weights of a label. They are the same in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(label.encode()))
    # Sorted by name, because two libraries list the tensors of a model in different orders.
    return {name: (SPREAD * torch.randn(shape, generator=generator)).to(dtype) for name, (shape, dtype) in sorted(shapes.items())}


class NamedLate(Push):
    """Names the version in ``/update_weight_version``, as several trainers do, so that engines learn it only at the commit."""

    def _body(self, bucket: Any) -> dict[str, Any]:
        body = super()._body(bucket)
        body.pop("weight_version", None)
        return body

    def _call(self, phase: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if phase == "end":
            super()._call("name", "/update_weight_version", {"new_version": self._options.version})
        return super()._call(phase, path, body)


def stall(self: ProcessGroup, buffer: Any, *, timeout: float) -> None:
    """Replace the broadcast, as if the trainer's GPU never got there. The engines wait for the trainer."""
    print(json.dumps({"stalled": True}), flush=True)
    time.sleep(timeout)


def hold(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, and wait before the last third."""
    for index, item in enumerate(weights.items()):
        if index == 2 * len(weights) // 3:
            time.sleep(HOLD_SECONDS)
        yield item


@contextmanager
def small_buckets(weights: dict[str, torch.Tensor]) -> Iterator[int]:
    """Cut a push into several shards and buckets, and return the maximum bytes of each."""
    size = max(1, sum(tensor.nbytes for tensor in weights.values()) // 3)
    with patch.object(upload, "SHARD_BYTES", size):
        yield size


@contextmanager
def paused(url: str) -> Iterator[None]:
    """Pause the fleet, as trainers do that send their weights in a pause of their own."""
    http = Http(url)
    http.post("/pause_generation", {"mode": "retract"}, timeout=STEP_SECONDS)
    try:
        yield
    finally:
        http.post("/continue_generation", {}, timeout=STEP_SECONDS)
        http.close()


def push_staged(fleet: Fleet, weights: dict[str, torch.Tensor], label: str, words: set[str]) -> PushResult:
    """Push to a fleet with transport Staged. For the words see above."""
    with ExitStack() as ends:
        if "paused" in words:
            ends.enter_context(paused(fleet.url))
        if "group" in words:
            fleet = ends.enter_context(connect(fleet.url, timeout=STEP_SECONDS))
            fleet.open_group()
        size = ends.enter_context(small_buckets(weights))
        specs = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()]
        tensors = hold(weights) if "hold" in words else weights
        return fleet.push(tensors, version=label, timeout=STEP_SECONDS, bucket_bytes=size, specs=specs)


def push(fleet: Fleet, weights: dict[str, torch.Tensor], label: str, manner: str) -> dict[str, Any]:
    """Push and return the outcome. The digest of the weights is printed first, because the push may not return."""
    print(json.dumps({"label": label, "policy": policy_digest(held_from(weights)).hex()}), flush=True)
    began = time.monotonic()
    error, fenced = "", {}
    keep = True if manner == "keep" else None
    words = set(manner.split()) & STAGED
    try:
        if words:
            result = push_staged(fleet, weights, label, words)
        else:
            result = fleet.push(weights, version=label, timeout=STEP_SECONDS, snapshot=keep)
        fenced = result.fenced
        if result.snapshot is not None:
            result.snapshot.result(60)
    except (FleetError, OSError) as failed:
        error = str(failed)
    return {"label": label, "ok": not error, "seconds": round(time.monotonic() - began, 2), "error": error, "fenced": fenced}


def main() -> None:
    """Serve until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("snapshots", nargs="?")
    parser.add_argument("--model")
    options = parser.parse_args()
    with StandIn(model=options.model) as stand_in:
        base = stand_in.tensors()
    shapes = {name: (tuple(held.shape), getattr(torch, held.dtype)) for name, held in base.items()}
    # Snapshots are written only for the pushes that request one.
    snapshots = Snapshots(options.snapshots, model="/models/tiny", every=1_000_000) if options.snapshots else None
    with connect(options.url, timeout=60, snapshots=snapshots) as fleet:
        print(json.dumps({"ready": True, "pid": os.getpid(), "policy": policy_digest(held_from(base)).hex()}), flush=True)
        for line in sys.stdin:
            manner, _, label = line.strip().rpartition(" ")
            setattr(module, "Push", NamedLate if manner == "late" else Push)  # noqa: B010 - the class that push() uses
            with patch.object(ProcessGroup, "broadcast", stall) if manner == "stall" else nullcontext():
                print(json.dumps(push(fleet, policy(label, shapes), label, manner)), flush=True)


if __name__ == "__main__":
    main()
