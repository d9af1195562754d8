"""The half of bench.push that needs torch: pushes the same tensors both ways in turns and prints the times as JSON."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors.torch import load_file

from sglang_rollout.trainer import connect
from sglang_rollout.trainer.buckets import described, plan
from sglang_rollout.trainer.group import Group, Rendezvous
from sglang_rollout.trainer.push import UPDATE
from sglang_rollout.trainer.waiting import Deadline

SECONDS = 120.0


class Bare:
    """SGLang's own API on every engine, nothing between."""

    def __init__(self, engines: list[str]) -> None:
        self._engines = engines
        self._sessions = [requests.Session() for _ in engines]
        self._pool = ThreadPoolExecutor(len(engines) + 1)
        self._group: Group | None = None

    def open(self) -> None:
        """Open a group as the trainer does, with the calls sent straight to the engines."""
        meeting = Rendezvous(host="127.0.0.1", world_size=1 + len(self._engines), backend="gloo", device=None, deadline=Deadline(SECONDS))
        body = {"master_address": "127.0.0.1", "master_port": meeting.port, "world_size": meeting.world_size}
        body |= {"group_name": meeting.name, "backend": "gloo"}
        calls = [
            self._pool.submit(self._post, index, "/init_weights_update_group", body | {"rank_offset": 1 + index})
            for index in range(len(self._engines))
        ]
        process_group = meeting.join()
        for call in calls:
            call.result()
        self._group = Group(meeting, process_group, epoch=0, members=self._engines)

    def close(self) -> None:
        """Close the group everywhere."""
        assert self._group is not None
        self._all("/destroy_weights_update_group", {"group_name": self._group.name})
        self._group.close()

    def push(self, tensors: dict[str, torch.Tensor], bucket_bytes: int) -> dict[str, float]:
        """One push; milliseconds."""
        assert self._group is not None
        group = self._group
        started = time.monotonic()
        self._all("/pause_generation", {"mode": "retract"})
        self._all("/begin_weight_update", {})
        begun = time.monotonic()
        buckets = plan(((described(tensor, name), tensor) for name, tensor in tensors.items()), bucket_bytes)
        for turn, bucket in enumerate(buckets):
            buffer = group.flatten(bucket, turn)
            body = bucket.request(group.name) | {"flush_cache": bucket.last}
            calls = [self._pool.submit(self._post, index, UPDATE, body) for index in range(len(self._engines))]
            group.broadcast(buffer, timeout=SECONDS)
            for call in calls:
                call.result()
        ended = time.monotonic()
        self._all("/end_weight_update", {})
        self._all("/continue_generation", {})
        return {"transfer": (ended - begun) * 1000, "whole": (time.monotonic() - started) * 1000}

    def _all(self, path: str, body: dict[str, Any]) -> None:
        list(self._pool.map(lambda index: self._post(index, path, body), range(len(self._engines))))

    def _post(self, index: int, path: str, body: dict[str, Any]) -> None:
        self._sessions[index].post(self._engines[index] + path, json=body, timeout=SECONDS).raise_for_status()


def through_url(url: str, tensors: dict[str, torch.Tensor], bucket_bytes: int, rounds: int) -> Callable[[], dict[str, float]]:
    """A function that pushes once through the fleet's URL; milliseconds."""
    fleet = connect(url, timeout=60)
    fleet.open_group("gloo")
    version = iter(range(1, rounds + 100))

    def push() -> dict[str, float]:
        started = time.monotonic()
        result = fleet.push(tensors, version=next(version), bucket_bytes=bucket_bytes)
        whole = (time.monotonic() - started) * 1000
        phases = result.phases
        # Flattening is inside the bare way's span; here it stands apart (and counts double where it overlaps with a broadcast).
        transfer = phases["prepare"] + phases["transfer"]
        return {"transfer": transfer, "whole": whole, "bytes": float(result.bytes), **{f"phase_{k}": v for k, v in phases.items()}}

    return push


def main() -> None:
    """Measure in turns, so that both ways see the same machine; the first round of each warms up and is left out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--engines", nargs="+", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--bucket-mib", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tensors = load_file(options.model / "model.safetensors")
    bucket_bytes = options.bucket_mib << 20
    push = through_url(options.url, tensors, bucket_bytes, options.rounds)
    measured: dict[str, list[dict[str, float]]] = {"bare": [], "fleet": []}
    bare = Bare(options.engines)
    bare.open()
    for number in range(options.rounds + 1):
        rows = {"fleet": push(), "bare": bare.push(tensors, bucket_bytes)}
        for way, row in rows.items():
            measured[way] += [row] if number else []
    bare.close()
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
