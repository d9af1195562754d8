"""The half of bench.push that needs torch: pushes the same tensors each way in turns and prints the times, a line of JSON per push.

Ways: *gloo*, one broadcast to as many ranks that do nothing else; *direct*, SGLang's own API on each engine; *fleet*, ``Fleet.push``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
import torch
import torch.distributed as dist
from bench.common import cpu_seconds
from bench.fleets import engine_python
from safetensors.torch import load_file

from sglang_rollout.trainer import connect
from sglang_rollout.trainer.buckets import described, plan
from sglang_rollout.trainer.group import Group, Rendezvous
from sglang_rollout.trainer.push import UPDATE
from sglang_rollout.trainer.testing import StandIn
from sglang_rollout.trainer.waiting import Deadline

SECONDS = 120.0
Row = dict[str, Any]
Push = Callable[[], Row]


class Gloo:
    """One buffer to all ranks, and nothing else: the least that a push can take."""

    def __init__(self, ranks: int, nbytes: int, rounds: int) -> None:
        meeting = Rendezvous(host="127.0.0.1", world_size=1 + ranks, backend="gloo", device=None, deadline=Deadline(SECONDS))
        line = [str(meeting.port), meeting.name, str(meeting.world_size), str(nbytes), str(rounds)]
        self._peers = engine_python("bench.push_receivers", *line, stdout=sys.stderr)
        self._group = meeting.join()
        self._meeting = meeting
        self._buffer = torch.zeros(nbytes, dtype=torch.uint8)

    def push(self) -> Row:
        """One broadcast, until the last rank has it; milliseconds."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        started = time.monotonic()
        self._group.broadcast([self._buffer], options).wait()
        self._group.barrier().wait()
        return {"whole": (time.monotonic() - started) * 1000}

    def close(self) -> None:
        """Wait for the peers, which have done their rounds."""
        self._peers.wait(SECONDS)


class Direct:
    """SGLang's own API on every engine, nothing between."""

    def __init__(self, engines: list[str], tensors: dict[str, torch.Tensor], bucket_bytes: int) -> None:
        self._engines, self._tensors, self._bucket_bytes = engines, tensors, bucket_bytes
        self._sessions = [requests.Session() for _ in engines]
        self._pool = ThreadPoolExecutor(len(engines) + 1)
        meeting = Rendezvous(host="127.0.0.1", world_size=1 + len(engines), backend="gloo", device=None, deadline=Deadline(SECONDS))
        body = {"master_address": "127.0.0.1", "master_port": meeting.port, "world_size": meeting.world_size}
        body |= {"group_name": meeting.name, "backend": "gloo"}
        calls = [
            self._pool.submit(self._post, index, "/init_weights_update_group", body | {"rank_offset": 1 + index})
            for index in range(len(engines))
        ]
        process_group = meeting.join()
        for call in calls:
            call.result()
        self._group = Group(meeting, process_group, epoch=0, members=engines)

    def push(self) -> Row:
        """One push; milliseconds."""
        group = self._group
        started = time.monotonic()
        self._all("/pause_generation", {"mode": "retract"})
        self._all("/begin_weight_update", {})
        begun = time.monotonic()
        buckets = plan(((described(tensor, name), tensor) for name, tensor in self._tensors.items()), self._bucket_bytes)
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

    def close(self) -> None:
        """Close the group everywhere."""
        self._all("/destroy_weights_update_group", {"group_name": self._group.name})
        self._group.close()

    def _all(self, path: str, body: dict[str, Any]) -> None:
        list(self._pool.map(lambda index: self._post(index, path, body), range(len(self._engines))))

    def _post(self, index: int, path: str, body: dict[str, Any]) -> None:
        self._sessions[index].post(self._engines[index] + path, json=body, timeout=SECONDS).raise_for_status()


class Through:
    """``Fleet.push`` through the fleet's URL."""

    def __init__(self, url: str, tensors: dict[str, torch.Tensor], bucket_bytes: int, parts: dict[str, list[int]]) -> None:
        self._tensors, self._bucket_bytes, self._parts = tensors, bucket_bytes, {**parts, "trainer": [os.getpid()]}
        self._fleet = connect(url, timeout=60)
        started = time.monotonic()
        self._fleet.open_group("gloo", host="127.0.0.1")
        self.opened = (time.monotonic() - started) * 1000
        self._version = 0

    def push(self) -> Row:
        """One push; milliseconds by the client's clock, by the coordinator's, and of processor time of each part."""
        self._version += 1
        before = {name: cpu_seconds(pids) for name, pids in self._parts.items()}
        started = time.monotonic()
        result = self._fleet.push(self._tensors, version=self._version, bucket_bytes=self._bucket_bytes)
        whole = (time.monotonic() - started) * 1000
        cpu = {name: round((cpu_seconds(pids) - before[name]) * 1000) for name, pids in self._parts.items()}
        last = self._fleet.document().last_update
        phases = dict(last.phases_ms) if last is not None else {}
        row = {"whole": whole, "bytes": result.bytes, "buckets": result.buckets, "paused": phases.pop("total", 0)}
        return {**row, "client": result.phases, "coordinator": phases, "cpu": cpu}

    def close(self) -> None:
        """Close the group."""
        self._fleet.close()


def load(model: Path | None) -> dict[str, torch.Tensor]:
    """The model's tensors; of none, those of a stand-in."""
    if model is not None:
        return dict(load_file(model / "model.safetensors"))
    with StandIn() as stand_in:
        return stand_in.state_dict()


def main() -> None:
    """Measure in turns, so that all ways see the same machine; the first round of each warms up and is left out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--engines", nargs="+", required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--bucket-mib", type=int, required=True)
    parser.add_argument("--ways", nargs="+", default=["gloo", "direct", "fleet"])
    parser.add_argument("--parts", type=json.loads, default={}, help="process ids by name, whose processor time is measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tensors, bucket_bytes = load(options.model), options.bucket_mib << 20
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    makers: dict[str, Callable[[], Gloo | Direct | Through]] = {
        "gloo": lambda: Gloo(len(options.engines), nbytes, options.rounds + 1),
        "fleet": lambda: Through(options.url, tensors, bucket_bytes, options.parts),
        "direct": lambda: Direct(options.engines, tensors, bucket_bytes),
    }
    ways = {name: make() for name, make in makers.items() if name in options.ways}
    for number in range(options.rounds + 1):
        for name, way in ways.items():
            row = way.push()
            if number:
                print(json.dumps({"way": name, **row}), flush=True)
    for way in ways.values():
        way.close()


if __name__ == "__main__":
    main()
