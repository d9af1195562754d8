"""A trainer in its own process, because it needs torch. It reads a number from each line, and pushes this number of times.

    python -m bench.pusher URL [--model FOLDER] [--reopen 10] [--snapshots FOLDER] [--token TOKEN] [--upload]

The answer to a line is a line of JSON, ``[[began, ended], …]`` by the machine's monotonic clock. Each push has other values.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.fleets import engine_python


class Pusher:
    """The benchmark's handle on the trainer process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    def push(self, times: int = 1) -> list[tuple[float, float]]:
        """Push this number of times, wait, and return when each push began and ended."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the pusher has no pipes")
        print(times, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("bench.pusher ended; its error is above.")
        return [(began, ended) for began, ended in json.loads(line)]


@contextmanager
def pusher(url: str, *options: str) -> Iterator[Pusher]:
    """Run a trainer that is connected to the fleet."""
    process = engine_python("bench.pusher", url, *options, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    try:
        yield Pusher(process)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Serve until the input ends."""
    import torch
    from bench.push_worker import load

    from sglang_rollout.trainer import Snapshots, connect

    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--reopen", type=int, default=0, help="open a new process group after this number of pushes; 0: only if necessary")
    parser.add_argument("--snapshots", type=Path, help="write a snapshot of every push, and wait until it is complete")
    parser.add_argument("--token", help="token of each call")
    parser.add_argument("--upload", action="store_true", help="upload to a fleet with transport Staged, without a process group")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tensors, versions = load(options.model), itertools.count(1)
    snapshots = Snapshots(options.snapshots, model=options.model) if options.snapshots else None
    with connect(options.url, timeout=60, snapshots=snapshots, token=options.token) as fleet:
        for line in sys.stdin:
            spans = []
            for _, version in zip(range(int(line)), versions, strict=False):
                if not options.upload and (version == 1 or (options.reopen and version % options.reopen == 1)):
                    fleet.open_group("gloo", host="127.0.0.1")
                moved = {name: tensor + 0.01 * version for name, tensor in tensors.items()}
                began = time.monotonic()
                fleet.push(moved, version=version)
                spans.append((began, time.monotonic()))
            if snapshots is not None:
                snapshots.wait()
            print(json.dumps(spans), flush=True)


if __name__ == "__main__":
    main()
