"""A trainer's part of one process group with the weight store, commanded by lines of JSON; needs a Python with torch.

{"do": "open", "group": NAME}                                    -> {"port": P}, and when both have joined {"joined": true}
{"do": "send", "tensors": [[name, dtype, shape], …], "seed": N, "flat": bool}
                                                                 -> {"sha256": of all bytes}; after a {"do": "go"}: {"sent": SECONDS}
                                                                    or {"error": TEXT}
"""

import hashlib
import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LIMIT = timedelta(seconds=240)


def answer(**document: Any) -> None:
    print(json.dumps(document), flush=True)


def ask() -> dict[str, Any]:
    line = sys.stdin.readline()
    if not line:
        sys.exit()
    return dict(json.loads(line))


def join(group: str) -> tuple[Any, Any]:
    server = dist.TCPStore("127.0.0.1", 0, None, True, timeout=LIMIT, wait_for_workers=False)
    answer(port=server.port)
    prefixed = dist.PrefixStore("cpu/", dist.PrefixStore(f"{group}/", dist.PrefixStore(group, server)))
    options = dist.ProcessGroupGloo._Options()
    options._timeout = LIMIT
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    made = dist.ProcessGroupGloo(prefixed, 0, 2, options)
    answer(joined=True)
    return server, made


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
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    sent = [torch.cat([as_bytes(tensor) for tensor in built])] if flat else built
    began = time.monotonic()
    try:
        for tensor in sent:
            made.broadcast([tensor], options).wait()
    except RuntimeError as error:
        answer(error=str(error))
    else:
        answer(sent=time.monotonic() - began)


def main() -> None:
    torch.set_num_threads(1)
    held: tuple[Any, Any] = (None, None)
    # The store and the process group; the store must stay open.
    while True:
        command = ask()
        if command.pop("do") == "open":
            held = join(**command)
        else:
            send(held[1], **command)


if __name__ == "__main__":
    main()
