"""The part of bench.push that needs torch: push the same tensors each way in turns, and print a line of JSON with the times of each push.

Ways: *gloo*, one broadcast to the same number of ranks; *direct*, SGLang's own API on each engine; *fleet*, ``Fleet.push``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
import torch
import torch.distributed as dist
from bench.fleets import engine_python
from bench.push_meters import Calls, Meters, Processes
from safetensors.torch import load_file

from sglang_rollout.testing import StandIn
from sglang_rollout.trainer import connect
from sglang_rollout.trainer.calls import Deadline
from sglang_rollout.trainer.process_group import ProcessGroup, Rendezvous
from sglang_rollout.trainer.push import UPDATE
from sglang_rollout.trainer.tensors import plan_buckets, read_spec

SECONDS = 120.0
Row = dict[str, Any]
Push = Callable[[], Row]


class Gloo:
    """Broadcasts one buffer to all ranks, which is the minimum of a push."""

    def __init__(self, ranks: int, nbytes: int) -> None:
        meeting = Rendezvous(host="127.0.0.1", world_size=1 + ranks, backend="gloo", device=None, deadline=Deadline(SECONDS))
        line = [str(meeting.port), meeting.name, str(meeting.world_size), str(nbytes)]
        self._peers = engine_python("bench.push_receivers", *line, stdout=sys.stderr)
        self._group = meeting.join()
        self._meeting = meeting
        self._buffer = torch.zeros(nbytes, dtype=torch.uint8)

    def push(self) -> Row:
        """Broadcast until the last rank has the buffer, and return the milliseconds."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        started = time.monotonic()
        self._group.broadcast([self._buffer], options).wait()
        self._group.barrier().wait()
        return {"whole": (time.monotonic() - started) * 1000}

    def close(self) -> None:
        """End the peers, which wait for a broadcast."""
        self._peers.kill()
        self._peers.wait(SECONDS)


class Direct:
    """Pushes with SGLang's own API on every engine."""

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
        self._group = ProcessGroup(meeting, process_group, epoch=0, members=engines)

    def push(self) -> Row:
        """One push; milliseconds."""
        group = self._group
        calls: dict[str, float] = {}
        started = time.monotonic()
        self._timed(calls, "/pause_generation", {"mode": "retract"})
        self._timed(calls, "/begin_weight_update", {})
        begun = time.monotonic()
        buckets = plan_buckets(((read_spec(name, tensor), tensor) for name, tensor in self._tensors.items()), self._bucket_bytes)
        for turn, bucket in enumerate(buckets):
            buffer = group.flatten(bucket, turn)
            body = bucket.request(group.name) | {"flush_cache": bucket.last}
            sent = time.monotonic()
            replies = [self._pool.submit(self._post, index, UPDATE, body) for index in range(len(self._engines))]
            group.broadcast(buffer, timeout=SECONDS)
            for reply in replies:
                reply.result()
            name = UPDATE.removeprefix("/")
            calls[name] = calls.get(name, 0.0) + (time.monotonic() - sent) * 1000
        ended = time.monotonic()
        self._timed(calls, "/end_weight_update", {})
        self._timed(calls, "/continue_generation", {})
        done = time.monotonic()
        steps = {"begin": begun - started, "transfer": ended - begun, "end": done - ended}
        return {"whole": (done - started) * 1000, "steps": {name: seconds * 1000 for name, seconds in steps.items()}, "calls": calls}

    def close(self) -> None:
        """Close the process group on all engines and here."""
        self._all("/destroy_weights_update_group", {"group_name": self._group.name})
        self._group.close()

    def _timed(self, calls: dict[str, float], path: str, body: dict[str, Any]) -> None:
        started = time.monotonic()
        self._all(path, body)
        calls[path.removeprefix("/")] = (time.monotonic() - started) * 1000

    def _all(self, path: str, body: dict[str, Any]) -> None:
        list(self._pool.map(lambda index: self._post(index, path, body), range(len(self._engines))))

    def _post(self, index: int, path: str, body: dict[str, Any]) -> None:
        self._sessions[index].post(self._engines[index] + path, json=body, timeout=SECONDS).raise_for_status()


class Through:
    """Pushes with ``Fleet.push`` through the fleet's URL."""

    def __init__(self, url: str, tensors: dict[str, torch.Tensor], bucket_bytes: int) -> None:
        self._tensors, self._bucket_bytes = tensors, bucket_bytes
        self._fleet = connect(url, timeout=60)
        self._fleet.open_group("gloo", host="127.0.0.1")
        self._version = 0

    def push(self) -> Row:
        """Push once, and return the milliseconds by the client's and by the coordinator's clock."""
        self._version += 1
        started = time.monotonic()
        result = self._fleet.push(self._tensors, version=self._version, bucket_bytes=self._bucket_bytes)
        whole = (time.monotonic() - started) * 1000
        last = self._fleet.document().last_update
        phases = dict(last.phases_ms) if last is not None else {}
        row = {"whole": whole, "bytes": result.bytes, "buckets": result.buckets, "paused": phases.pop("total", 0)}
        return {**row, "steps": result.phases, "coordinator": phases}

    def close(self) -> None:
        """Close the process group."""
        self._fleet.close()


def load(model: Path | None) -> dict[str, torch.Tensor]:
    """Return the model's tensors, or those of a stand-in."""
    if model is not None:
        return dict(load_file(model / "model.safetensors"))
    with StandIn() as stand_in:
        return stand_in.state_dict()


def take_turns(ways: dict[str, Push], rounds: int, seconds: float) -> Iterator[tuple[int, str, Push]]:
    """Yield round, name and way: all ways in each round, in an alternating order.

    Round 0 warms up. Stops after the round that passes ``seconds``.
    """
    end = time.monotonic() + seconds
    for number in range(rounds + 1):
        names = list(ways)
        for name in names if number % 2 else reversed(names):
            yield number, name, ways[name]
        if time.monotonic() > end:
            print(f"bench.push_worker: {number} of {rounds} rounds in {seconds:.0f} s", file=sys.stderr)
            return


def main() -> None:
    """Push each way in turns, so that the machine's load affects all ways, and print a row for each push except those of round 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--engines", nargs="+", required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no round after this time")
    parser.add_argument("--bucket-mib", type=int, required=True)
    parser.add_argument("--ways", nargs="+", default=["gloo", "direct", "fleet"])
    parser.add_argument("--parts", type=json.loads, default={}, help="process IDs by name, whose processor time is measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tensors, bucket_bytes = load(options.model), options.bucket_mib << 20
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    makers: dict[str, Callable[[], Gloo | Direct | Through]] = {
        "gloo": lambda: Gloo(len(options.engines), nbytes),
        "fleet": lambda: Through(options.url, tensors, bucket_bytes),
        "direct": lambda: Direct(options.engines, tensors, bucket_bytes),
    }
    ways = {name: make() for name, make in makers.items() if name in options.ways}
    processes = Processes({**options.parts, "trainer": [os.getpid()]})
    meters = {name: Meters(processes, Calls(options.url) if name == "fleet" else None) for name in ways}
    pushes = {name: way.push for name, way in ways.items()}
    for number, name, push in take_turns(pushes, options.rounds, options.seconds):
        meters[name].start()
        row = push()
        found = meters[name].stop()
        if number:
            print(json.dumps({"way": name, "round": number, **found, **row}), flush=True)
    for way in ways.values():
        way.close()


if __name__ == "__main__":
    main()
