"""Close a process group during a broadcast while the other rank is stopped; run by a Python with torch.

Prints whether the broadcast still runs after the process group was closed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from sglang_rollout.testing.process_groups import Rank
from sglang_rollout.trainer.calls import Deadline, run_in_background
from sglang_rollout.trainer.process_group import FilledBuffer, ProcessGroup, Rendezvous

LIMIT = 20.0
BYTES = 256 << 20
"""More than the kernel buffers for a peer that does not read."""


def peer(port: int, name: str) -> None:
    """Run rank 1, which joins and then stops itself."""
    joined = Rank(host="127.0.0.1", port=port, group=name, rank=1, world_size=2)
    joined.join()
    os.kill(os.getpid(), signal.SIGSTOP)
    print(joined, file=sys.stderr)


def unsent() -> int:
    """Return the largest number of unread bytes in a TCP connection of this network namespace."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return max(int(row[4].split(":")[1], 16) for row in rows)  # rx_queue


def main() -> None:
    """Run rank 0."""
    meeting = Rendezvous(host="127.0.0.1", world_size=2, backend="gloo", device=None, deadline=Deadline(LIMIT))
    child = os.fork()
    if child == 0:
        peer(meeting.port, meeting.name)
    group = ProcessGroup(meeting, meeting.join(), epoch=1, members=["stopped"])
    os.waitpid(child, os.WUNTRACED)
    sent = run_in_background(group.broadcast, FilledBuffer(torch.zeros(BYTES, dtype=torch.uint8), None), timeout=LIMIT)
    while unsent() == 0:  # until the kernel holds bytes that the peer does not read
        time.sleep(0.05)
    group.close()
    print("running" if not sent.done() else "ended")
    sys.stdout.flush()
    os.kill(child, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
