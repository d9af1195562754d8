"""The part of bench.staged that needs torch: push the same tensors each way in turns, and print a line of JSON for each push.

    python -m bench.staged_worker --distributed URL --staged URL [--model FOLDER] [--bucket-mib 256 32] [--ways …] --rounds 10

Ways: *gloo*, one broadcast to as many ranks as a fleet has engines; *distributed*, ``Fleet.push`` with transport Distributed; *group* and
*upload*, ``Fleet.push`` with transport Staged, through a process group and as an upload; *early*, an upload with ``wait="staged"``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench.common import cpu_seconds
from bench.push_meters import paused
from bench.push_worker import Gloo, Push, Row, load, take_turns

from sglang_rollout.trainer import connect
from sglang_rollout.trainer.upload import Wait

WAYS = ("gloo", "distributed", "group", "upload", "early")
COMMIT_SECONDS = 60.0
POLL_SECONDS = 0.02


class Pusher:
    """Pushes through one fleet's URL, with one version after another.

    Args:
        url: The fleet.
        tensors: The tensors of each push.
        opens_group: True: push through a process group.
    """

    def __init__(self, url: str, tensors: dict[str, torch.Tensor], *, opens_group: bool) -> None:
        self._url, self._tensors = url, tensors
        self._fleet = connect(url, timeout=60)
        if opens_group:
            self._fleet.open_group("gloo", host="127.0.0.1")

    def push(self, bucket_bytes: int, wait: Wait = "committed") -> Row:
        """Push once, and return the milliseconds until the call returned (``whole``) and until all bytes were taken (``blocked``).

        ``paused`` and ``paused_mean`` are the longest and the mean pause of the engines, by the clocks of their agents.
        """
        step = self._fleet.document().committed.step + 1
        before, started = paused(self._url), time.monotonic()
        result = self._fleet.push(self._tensors, version=step, bucket_bytes=bucket_bytes, wait=wait)
        whole = (time.monotonic() - started) * 1000
        phases = self._wait_for_commit(str(step))
        taken = sum(result.phases.get(name, 0.0) for name in ("group", "begin", "transfer"))
        pauses = [total - before[agent] for agent, total in paused(self._url).items()]
        row = {
            "paused": max(pauses),
            "paused_mean": sum(pauses) / len(pauses),
            "whole": whole,
            "blocked": whole if wait == "staged" else taken,
            "bytes": result.bytes,
            "buckets": result.buckets,
        }
        return {**row, "steps": result.phases, "coordinator": phases}

    def _wait_for_commit(self, label: str) -> dict[str, int]:
        """Wait until the version is committed and the fleet is idle, and return the coordinator's milliseconds in each phase."""
        end = time.monotonic() + COMMIT_SECONDS
        while True:
            document = self._fleet.document()
            last = document.last_update
            if document.phase == "idle" and last is not None and last.version.label == label and document.committed.label == label:
                return dict(last.phases_ms)
            if time.monotonic() > end:
                raise SystemExit(f"version {label} was not committed within {COMMIT_SECONDS:.0f} s: {last}")
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Close the process group."""
        self._fleet.close()


def make_pushes(options: argparse.Namespace, tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Push], list[Callable[[], None]]]:
    """Return the ways by ``NAME BUCKET_MIB``, and what closes them."""
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    pushes: dict[str, Push] = {}
    closers: list[Callable[[], None]] = []
    if "gloo" in options.ways:
        gloo = Gloo(options.ranks, nbytes)
        pushes["gloo 0"] = gloo.push
        closers.append(gloo.close)
    for name, url in (("distributed", options.distributed), ("group", options.staged), ("upload", options.staged)):
        ways: dict[str, Wait] = {"upload": "committed", "early": "staged"} if name == "upload" else {name: "committed"}
        wanted = {way: wait for way, wait in ways.items() if way in options.ways}
        if not wanted:
            continue
        pusher = Pusher(url, tensors, opens_group=name != "upload")
        closers.append(pusher.close)
        for way, wait in wanted.items():
            for mib in options.bucket_mib if name != "upload" else [max(options.bucket_mib)]:
                pushes[f"{way} {mib}"] = partial(pusher.push, mib << 20, wait)
    return pushes, closers


def main() -> None:
    """Push each way in turns, and print a row for each push except those of round 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--distributed", required=True, help="URL of the fleet with transport Distributed")
    parser.add_argument("--staged", required=True, help="URL of the fleet with transport Staged")
    parser.add_argument("--ranks", type=int, required=True, help="engines of each fleet")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no round after this time")
    parser.add_argument("--bucket-mib", type=int, nargs="+", default=[256, 32])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--parts", type=json.loads, default={}, help="process IDs by name, whose processor time is measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pushes, closers = make_pushes(options, load(options.model))
    parts: dict[str, list[int]] = {**options.parts, "trainer": [os.getpid()]}
    for number, name, push in take_turns(pushes, options.rounds, options.seconds):
        used = {part: cpu_seconds(pids) for part, pids in parts.items()}  # with ended threads, which copy most bytes
        row: dict[str, Any] = push()
        cpu = {part: round((cpu_seconds(pids) - used[part]) * 1000, 1) for part, pids in parts.items()}
        way, mib = name.split()
        if number:
            print(json.dumps({"way": way, "mib": int(mib), "round": number, "cpu": cpu, **row}), flush=True)
    for close in closers:
        close()


if __name__ == "__main__":
    main()
