"""Measure an all-reduce over the ranks of this pod, in the engine's container before SGLang starts, with the image's torch.

Each rank is a process: this program with one more argument. So its GPU memory is released when it ends, and a rank that hangs can be
killed.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

FAILED = 78
WARM_UP = 3
ROUNDS = 10


def measure(rank: int, options: argparse.Namespace) -> None:
    """Run one rank. Rank 0 writes the result."""
    if options.backend == "gloo":
        # All ranks are in this pod, whose name may not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch  # noqa: PLC0415 - only ranks need it
    import torch.distributed as dist  # noqa: PLC0415

    gpus, ranks = options.backend == "nccl", options.ranks
    if gpus:
        torch.cuda.set_device(rank)
    # A file, not a port: with hostNetwork ports belong to the node.
    store = dist.FileStore(f"{options.file}.store", ranks)
    dist.init_process_group(options.backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=options.seconds))
    tensor = torch.zeros(options.megabytes * 250_000, device="cuda" if gpus else "cpu")
    taken = []
    for _ in range(WARM_UP + ROUNDS):
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if gpus:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    if rank == 0:
        # Bus bandwidth, as nccl-tests counts it: the load of one link, independent of the number of ranks.
        bandwidth = options.megabytes / 1000 * 2 * (ranks - 1) / ranks / statistics.median(taken[WARM_UP:])
        Path(options.file).write_text(f"{bandwidth:.3g}\n")
    dist.destroy_process_group()


def run(options: argparse.Namespace) -> str:
    """Run all ranks and return what failed; empty if nothing did. No rank is left running."""
    until = time.monotonic() + options.seconds
    ranks = [subprocess.Popen([*sys.orig_argv, "--rank", str(rank)]) for rank in range(options.ranks)]
    try:
        while time.monotonic() < until:
            codes = [process.poll() for process in ranks]
            failed = next((rank for rank, code in enumerate(codes) if code), None)
            if failed is not None:
                return f"failed: rank {failed} of {options.ranks} ended with code {codes[failed]}"
            if None not in codes:
                return ""
            time.sleep(0.1)
        return f"did not end within {options.seconds:g} s"
    finally:
        for process in ranks:
            process.kill()


def judge(options: argparse.Namespace) -> str:
    """Return why SGLang must not start on this node; empty if it may."""
    for leftover in (options.file, f"{options.file}.store"):
        Path(leftover).unlink(missing_ok=True)
    failed = run(options)
    if failed:
        return f"all-reduce on node {options.node} {failed}"
    reached = float(Path(options.file).read_text())
    print(f"all-reduce over the {options.ranks} ranks of this pod: {reached:g} GB/s", flush=True)
    if reached < options.floor:
        asked = f"engine.preflight.allReduce.floorGBps asks for {options.floor}"
        return f"all-reduce reached {reached:g} GB/s on node {options.node}, {asked}"
    return ""


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--megabytes", type=int, required=True)
    parser.add_argument("--floor", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--file", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--rank", type=int)
    options = parser.parse_args()
    if options.rank is not None:
        measure(options.rank, options)
        return 0
    problem = judge(options)
    if problem:
        print(f"preflight failed: {problem}", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
