"""Copies of a version over HTTP and with Mooncake Transfer Engine over TCP, in turns on one machine.

    python -m bench.staged_mooncake [--pods 4] [--size 200000000] [--pairs 5]

It needs the extra ``mooncake``. Both ways run the staging package's server and client, and compute digests. The pages name the ratios only
as a reason to use HTTP without RDMA: loopback says nothing about RDMA.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from bench.common import cpu_seconds
from bench.push import quartiles
from bench.staged_fanout import Child, children, drop, stage, tree


def descendants(pids: Sequence[int]) -> list[int]:
    """Return these processes and their children."""
    found = list(pids)
    for pid in pids:
        found += [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
    return found


def used_cpu(started: Sequence[Child]) -> float:
    """Return the processor time of the pods and of their children, also of those that have ended."""
    pids = [child.process.pid for child in started]
    ended = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ended += int(fields[13]) + int(fields[14])
    return cpu_seconds(descendants(pids)) + ended / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure and print."""
    os.environ["MC_FORCE_TCP"] = "1"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=4)
    parser.add_argument("--size", type=int, default=200_000_000)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    if importlib.util.find_spec("mooncake") is None:
        raise SystemExit("Mooncake Transfer Engine is not installed: pip install 'sglang-rollout[mooncake]'.")
    with children(options.pods) as started:
        started[0].send(do="fill", size=options.size)
        filled = started[0].read()
        for pods, used in ((1, [started[0], Child(started[1].process, range(1, 2))]), (options.pods, started)):
            parents = tree(pods, 2)
            times: list[tuple[float, float]] = []
            cpu = [0.0, 0.0]
            for turn in range(options.pairs + 1):
                pair = [0.0, 0.0]
                for way in (0, 1) if turn % 2 else (1, 0):
                    before = used_cpu(used)
                    pair[way] = stage(used, parents, options.size, filled["digest"], mooncake=bool(way))
                    cpu[way] += used_cpu(used) - before if turn else 0.0
                    drop(started, filled["update"])
                if turn:
                    times.append((pair[0], pair[1]))
            http, mooncake = (quartiles([pair[way] for pair in times], 3) for way in (0, 1))
            ratio = quartiles([pair[1] / pair[0] for pair in times], 2)
            print(
                f"{pods} pods, {options.size / 1e6:.3g} MB, fan-out 2, seconds as quartiles: HTTP {http}, Mooncake over TCP {mooncake},"
                f" ratio {ratio}; CPU per copy {cpu[0] / options.pairs / pods:.2f} and {cpu[1] / options.pairs / pods:.2f} s"
            )


if __name__ == "__main__":
    main()
