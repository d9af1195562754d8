"""The row *fanout* of bench.staged: many pods copy a version that the weight store has completely.

The pods share a few processes of ``bench.staged_pods``. The baseline sends the same bytes along the same tree through plain sockets. Both
ways send with ``sendfile``, write new files of the same volume, and pass bytes on while more arrive: the staging package piece by piece,
the plain sockets as they come. Only the staging package computes digests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench.common import cpu_seconds, free_port
from bench.fleets import MEMORY
from bench.push import quartiles
from e2e.child import start_child

from sglang_rollout.coordinator.update.staging import parents_in_tree
from sglang_rollout.coordinator.update.store import STORE

PROCESSES = 4
"""Processes of the pods. The weight store has one more."""


@dataclass
class Child:
    """A process with some of the pods."""

    process: subprocess.Popen[str]
    pods: range

    def send(self, **command: Any) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        print(json.dumps(command), file=self.process.stdin, flush=True)

    def read(self) -> dict[str, Any]:
        """Return the next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("bench.staged_pods ended; its error is above.")
        return dict(json.loads(line))


@contextmanager
def children(pods: int) -> Iterator[list[Child]]:
    """Run the processes. The first has pod 0, the weight store, and the others have ``pods`` pods."""
    share = -(-pods // min(PROCESSES, pods))
    ranges = [range(1), *(range(first, min(first + share, pods + 1)) for first in range(1, pods + 1, share))]
    port = free_port(first=24000, row=2 * (pods + 1))
    with TemporaryDirectory(prefix="rollout-bench-", dir=MEMORY) as folder, ExitStack() as stack:
        started = []
        for each in ranges:
            line = [sys.executable, "-m", "bench.staged_pods", folder, str(port), str(each.start), str(len(each))]
            process = start_child(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait, 30)
            stack.callback(process.kill)
            started.append(Child(process, each))
        for child in started:
            child.read()
        yield started


def tree(pods: int, fanout: int) -> dict[int, list[int]]:
    """Return the pods from which each pod copies, as the coordinator chooses them; pod 0 is the weight store."""
    names = [str(number) for number in range(1, pods + 1)]
    return {int(name): [0 if each == STORE else int(each) for each in above] for name, above in parents_in_tree(names, fanout).items()}


def stage(started: Sequence[Child], parents: dict[int, list[int]], size: int, digest: str) -> float:
    """Copy with the staging package, and return the seconds until all pods have the version."""
    began = time.monotonic()
    for child in started[1:]:
        child.send(do="stage", parents={pod: parents[pod] for pod in child.pods}, size=size, digest=digest)
    return read_end(started[1:]) - began


def raw(started: Sequence[Child], parents: dict[int, list[int]], size: int) -> float:
    """Copy with plain sockets, and return the seconds until all pods have the bytes."""
    direct: dict[int, int | None] = {0: None, **{pod: above[0] for pod, above in parents.items()}}
    number = {pod: sum(above == pod for above in direct.values()) for pod in direct}
    for child in started:
        child.send(do="raw", size=size, parents={pod: direct[pod] for pod in child.pods}, children={pod: number[pod] for pod in child.pods})
    for child in started:
        child.read()
    began = time.monotonic()
    for child in started:
        child.send(do="go")
    return read_end(started) - began


def read_end(started: Sequence[Child]) -> float:
    """Wait until all processes are done, and return the time of the last one."""
    return max(float(child.read()["done"]) for child in started)


def drop(started: Sequence[Child], update: str) -> None:
    """Delete what the last copy has written."""
    for child in started:
        child.send(do="drop", keep=[update] if 0 in child.pods else [])
    for child in started:
        child.read()


def measure(*, pods: int, size: int, fanouts: Sequence[int], pairs: int) -> dict[str, Any]:
    """Measure both ways in turns with each fan-out, and one pod alone."""
    load = os.getloadavg()[0]
    with children(pods) as started:
        started[0].send(do="fill", size=size)
        filled = started[0].read()
        rows = []
        for number, fanout in ((1, 1), *((pods, fanout) for fanout in fanouts)):
            used = [child for child in started if child.pods.start <= number]
            parents = tree(pods, fanout) if number == pods else {1: [0]}
            rows.append(compare(used if number > 1 else limit(started), parents, size, filled, pairs) | {"pods": number, "fanout": fanout})
    return {"load": round(load, 2), "bytes": size, "processes": len(started), "rows": rows}


def limit(started: Sequence[Child]) -> list[Child]:
    """Return the weight store's process, and the one of the first pod as if it had no other."""
    return [started[0], Child(started[1].process, range(1, 2))]


def compare(started: Sequence[Child], parents: dict[int, list[int]], size: int, filled: dict[str, Any], pairs: int) -> dict[str, Any]:
    """Measure both ways in an order that alternates. The first pair warms up and is left out."""
    found: list[tuple[float, float]] = []
    pids = [child.process.pid for child in started]
    cpu = [0.0, 0.0]
    for turn in range(pairs + 1):
        times = [0.0, 0.0]
        for way in (0, 1) if turn % 2 else (1, 0):
            used = cpu_seconds(pids)
            times[way] = raw(started, parents, size) if way == 0 else stage(started, parents, size, filled["digest"])
            cpu[way] += (cpu_seconds(pids) - used) if turn else 0.0
            drop(started, filled["update"])
        if turn:
            found.append((times[0], times[1]))
    return {
        "pairs": pairs,
        "raw_s": quartiles([pair[0] for pair in found], 3),
        "staged_s": quartiles([pair[1] for pair in found], 3),
        "ratio": quartiles([pair[1] / pair[0] for pair in found], 2),
        "cpu_s": [round(each / pairs, 3) for each in cpu],
        "missed": median(pair[1] / pair[0] for pair in found) > 1.5,
    }


def show(row: dict[str, Any]) -> None:
    """Print the row for people."""
    print(f"fan-out of {row['bytes'] / 1e6:.3g} MB, {row['processes']} processes, load {row['load']}: median (quartiles); aim: ratio 1.5")
    for found in row["rows"]:
        (a, b, c), (d, e, f), (g, h, i) = found["raw_s"], found["staged_s"], found["ratio"]
        cpu = f"CPU {found['cpu_s'][0]:.2f} and {found['cpu_s'][1]:.2f} s"
        print(
            f"  {found['pods']} pods, fan-out {found['fanout']}: plain sockets {b:.3f} ({a:.3f} to {c:.3f}) s, staged {e:.3f} ({d:.3f} to"
            f" {f:.3f}) s, ratio {h:.2f} ({g:.2f} to {i:.2f}), {cpu}: {'MISSED' if found['missed'] else 'met'}",
            flush=True,
        )
