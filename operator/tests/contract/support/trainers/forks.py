"""Fork a trainer that has an open process group, with DataLoader and with os.fork(); run by a Python with torch.

Prints one JSON object: the samples that workers got of other workers, how the children ended, and whether the process group still works.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader

from sglang_rollout.testing.process_groups import Rank
from sglang_rollout.trainer import Fleet, connect
from sglang_rollout.trainer.calls import Deadline
from sglang_rollout.trainer.group_control import Heartbeat
from sglang_rollout.trainer.process_group import FilledBuffer, ProcessGroup, Rendezvous
from tests.unit.trainer.support.scripted_fleet import FakeFleet, Reply

LIMIT = 30.0
VALUE = 7
DESTROY = "/destroy_weights_update_group"


def run_peer(port: int, name: str) -> None:
    """Run rank 1, which ends well if it receives the broadcast."""
    joined = Rank(host="127.0.0.1", port=port, group=name, rank=1, world_size=2)
    joined.join()
    os._exit(0 if joined.receive(4) == bytes([VALUE] * 4) else 1)


class Prompts:
    """Samples that the workers of a DataLoader generate."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> tuple[str, str]:
        return f"prompt {index}", self._fleet.generate([f"prompt {index}"], timeout=LIMIT)[0].text


def echo(body: dict[str, Any]) -> Reply:
    """Answer with the prompt."""
    time.sleep(0.005)
    return 200, {"text": body["text"], "output_ids": [1], "meta_info": {}}


def close_in_a_child(fleet: Fleet) -> str:
    """Fork a child that closes the handle and ends as any Python program does. Return how it ended."""
    child = os.fork()
    if child == 0:
        fleet.close()
        sys.exit(0)
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return f"ended with {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.05)
    os.kill(child, 9)
    return "did not end"


def main() -> None:
    """Run rank 0."""
    meeting = Rendezvous(host="127.0.0.1", world_size=2, backend="gloo", device=None, deadline=Deadline(LIMIT))
    peer = os.fork()
    if peer == 0:
        run_peer(meeting.port, meeting.name)
    fake = FakeFleet().__enter__()  # not ended, because its thread does not exist in the children
    fake.replies["/generate"] = echo
    fake.replies[DESTROY] = (200, {"success": True})
    fleet = connect(fake.url, timeout=LIMIT)
    group = ProcessGroup(meeting, meeting.join(), epoch=1, members=["peer"])
    fleet._groups.group, fleet._groups._heartbeat = group, Heartbeat(fleet._http, group.name, lease=600.0)
    fleet.generate(["warm"])
    loader = DataLoader(Prompts(fleet), num_workers=2, batch_size=None, multiprocessing_context="fork")
    strange = [(prompt, text) for prompt, text in loader if prompt != text]
    closed = close_in_a_child(fleet)
    destroyed = fake.counts[DESTROY]
    group.broadcast(FilledBuffer(torch.full((4,), VALUE, dtype=torch.uint8), None), timeout=LIMIT)
    received = os.waitstatus_to_exitcode(os.waitpid(peer, 0)[1]) == 0
    fleet.close()
    print(json.dumps({"strange": strange, "closed": closed, "destroyed": destroyed, "received": received}))


if __name__ == "__main__":
    main()
