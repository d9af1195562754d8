"""The part of bench.staged_delta that needs torch: change tensors, push them to two fleets, and print a line of JSON for each push.

python -m bench.staged_delta_worker --complete URL --delta URL --model FOLDER --shares 0.001 0.01 0.1 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from bench.common import cpu_seconds
from bench.push_worker import load

from sglang_rollout.trainer import Fleet, connect


def change(tensors: dict[str, torch.Tensor], share: float) -> None:
    """Change a share of the elements of each tensor, at random places, by one percent."""
    for tensor in tensors.values():
        flat = tensor.view(-1)
        places = torch.randint(flat.numel(), (round(share * flat.numel()),))
        flat[places] = flat[places] * 1.01


def push(fleet: Fleet, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Push once. Return bytes and milliseconds: until the call returned (``whole``), ``transfer``, and the coordinator's ``stage``.

    ``sent`` are the bytes that the trainer sent, ``pods`` those that all engine pods received.
    """
    started = time.monotonic()
    result = fleet.push(tensors, version=fleet.document().committed.step + 1)
    whole = (time.monotonic() - started) * 1000
    document = fleet.document()
    last = document.last_update
    if last is None or document.committed.label != result.version:
        raise SystemExit(f"version {result.version} was not committed: {last}")
    copies = [copy for member in document.members for copy in member.staged if copy.version == document.committed]
    times = {"whole": whole, "transfer": result.phases["transfer"], "stage": last.phases_ms["stage"]}
    return {"bytes": result.bytes, "sent": result.transferred, "pods": sum(copy.transferred for copy in copies), **times}


def main() -> None:
    """Push in turns, and print a row for each push except those of round 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--complete", required=True, help="URL of the fleet that gets complete uploads")
    parser.add_argument("--delta", required=True, help="URL of the fleet that gets delta uploads")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--shares", type=float, nargs="+", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--parts", type=json.loads, default={}, help="process IDs by name, whose processor time is measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    tensors = load(options.model)
    parts: dict[str, list[int]] = {**options.parts, "trainer": [os.getpid()]}
    with connect(options.complete, timeout=60) as complete, connect(options.delta, timeout=60, delta=True) as delta:
        fleets = {"complete": complete, "delta": delta}
        for number in range(options.rounds + 1):
            for share in options.shares:
                change(tensors, share)
                for way in fleets if number % 2 else reversed(fleets):
                    used = {part: cpu_seconds(pids) for part, pids in parts.items()}
                    row = push(fleets[way], tensors)
                    cpu = {part: round((cpu_seconds(pids) - used[part]) * 1000, 1) for part, pids in parts.items()}
                    if number:
                        print(json.dumps({"way": way, "share": share, "round": number, "cpu": cpu, **row}), flush=True)


if __name__ == "__main__":
    main()
