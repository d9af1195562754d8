"""Measures how fast the ranks of this pod add up a tensor, in the engine's container before SGLang starts, with the image's torch.

Ranks are processes of their own, this program with one more argument: what they hold of a GPU goes with them, and one that hangs can
be killed.
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


def measure(rank: int, wanted: argparse.Namespace) -> None:
    """Be one of the ranks; the first writes the result."""
    if wanted.backend == "gloo":
        # All ranks are in this pod, and its name may not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch  # noqa: PLC0415 - only ranks need it
    import torch.distributed as dist  # noqa: PLC0415

    gpus, ranks = wanted.backend == "nccl", wanted.ranks
    if gpus:
        torch.cuda.set_device(rank)
    # A file, not a port: with hostNetwork ports belong to the node.
    store = dist.FileStore(f"{wanted.file}.store", ranks)
    dist.init_process_group(wanted.backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=wanted.seconds))
    tensor = torch.zeros(wanted.megabytes * 250_000, device="cuda" if gpus else "cpu")
    taken = []
    for _ in range(WARM_UP + ROUNDS):
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if gpus:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    if rank == 0:
        # Bus bandwidth, as nccl-tests counts: what a link carries, whatever the number of ranks.
        bandwidth = wanted.megabytes / 1000 * 2 * (ranks - 1) / ranks / statistics.median(taken[WARM_UP:])
        Path(wanted.file).write_text(f"{bandwidth:.3g}\n")
    dist.destroy_process_group()


def run(wanted: argparse.Namespace) -> str:
    """Start the ranks; what went wrong, or nothing. None of them is left."""
    until = time.monotonic() + wanted.seconds
    ranks = [subprocess.Popen([*sys.orig_argv, "--rank", str(rank)]) for rank in range(wanted.ranks)]
    try:
        while time.monotonic() < until:
            codes = [process.poll() for process in ranks]
            failed = next((rank for rank, code in enumerate(codes) if code), None)
            if failed is not None:
                return f"failed: rank {failed} of {wanted.ranks} ended with code {codes[failed]}"
            if None not in codes:
                return ""
            time.sleep(0.1)
        return f"did not end within {wanted.seconds:g} s"
    finally:
        for process in ranks:
            process.kill()


def judge(wanted: argparse.Namespace) -> str:
    """What is to be said against this node; nothing if SGLang may start."""
    for leftover in (wanted.file, f"{wanted.file}.store"):
        Path(leftover).unlink(missing_ok=True)
    failed = run(wanted)
    if failed:
        return f"all-reduce on node {wanted.node} {failed}"
    reached = float(Path(wanted.file).read_text())
    print(f"all-reduce over the {wanted.ranks} ranks of this pod: {reached:g} GB/s", flush=True)
    if reached < wanted.floor:
        asked = f"engine.preflight.allReduce.floorGBps asks for {wanted.floor}"
        return f"all-reduce reached {reached:g} GB/s on node {wanted.node}, {asked}"
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
    wanted = parser.parse_args()
    if wanted.rank is not None:
        measure(wanted.rank, wanted)
        return 0
    said = judge(wanted)
    if said:
        print(f"preflight failed: {said}", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
