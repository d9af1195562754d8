"""A trainer's part of one process group with the weight store, commanded by lines of JSON; needs a Python with torch.

{"do": "open", "group": NAME, "how": HOW, "world": N, "seconds": S}
                                                                 -> {"port": P, "group": NAME}, and when all have joined {"joined": true}
                                                                    or {"error": TEXT}
{"do": "send", "tensors": [[name, dtype, shape], …], "seed": N, "flat": bool}
                                                                 -> {"sha256": of all bytes}; after a {"do": "go"}: {"sent": SECONDS}
                                                                    or {"error": TEXT}

HOW: ``rendezvous`` as frameworks do, ``stateless``, or ``client``, our own client's, which chooses the name.
"""

import hashlib
import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch

from sglang_rollout.testing.trainer_group import broadcast, choose_port, close_group, open_group, open_stateless_group
from sglang_rollout.trainer.calls import Deadline
from sglang_rollout.trainer.process_group import Rendezvous

LIMIT_SECONDS = 240.0
HOST = "127.0.0.1"


def answer(**document: Any) -> None:
    print(json.dumps(document), flush=True)


def ask() -> dict[str, Any]:
    line = sys.stdin.readline()
    if not line:
        sys.exit()
    return dict(json.loads(line))


def join_with_client(seconds: float) -> tuple[Any, Any]:
    """Return the store, which must stay open, and the process group."""
    meeting = Rendezvous(host=HOST, world_size=2, backend="gloo", device=None, deadline=Deadline(seconds))
    answer(port=meeting.port, group=meeting.name)
    return meeting, meeting.join()


def join_as_framework(group: str, how: str, world: int, seconds: float) -> tuple[None, Any]:
    port, opener = choose_port(HOST), open_stateless_group if how == "stateless" else open_group
    answer(port=port, group=group)
    return None, opener(host=HOST, port=port, group=group, world_size=world, timeout=timedelta(seconds=seconds))


def join(group: str, how: str = "rendezvous", world: int = 2, seconds: float = LIMIT_SECONDS) -> tuple[Any, Any]:
    try:
        made = join_with_client(seconds) if how == "client" else join_as_framework(group, how, world, seconds)
    except RuntimeError as error:
        answer(error=str(error))
        return None, None
    answer(joined=True)
    return made


def make(seed: int, dtype: str, shape: list[int]) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(getattr(torch, dtype))


def as_bytes(tensor: Any) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def send(made: Any, tensors: list[tuple[str, str, list[int]]], seed: int, flat: bool) -> None:
    built = [make(seed + number, dtype, shape) for number, (_, dtype, shape) in enumerate(tensors)]
    digest = hashlib.sha256()
    for tensor in built:
        digest.update(memoryview(as_bytes(tensor).numpy()))
    answer(sha256=digest.hexdigest())
    ask()
    began = time.monotonic()
    try:
        broadcast(made, [torch.cat([as_bytes(tensor) for tensor in built])] if flat else built)
    except RuntimeError as error:
        answer(error=str(error))
    else:
        answer(sent=time.monotonic() - began)


def main() -> None:
    torch.set_num_threads(1)
    held: tuple[Any, Any] = (None, None)
    while True:
        command = ask()
        if command.pop("do") == "open":
            close_group(held[1])
            held = join(**command)
        else:
            send(held[1], **command)


if __name__ == "__main__":
    main()
