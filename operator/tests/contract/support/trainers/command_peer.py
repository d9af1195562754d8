"""A trainer's part of weight updates, commanded by lines of JSON; run by the engine environment's Python, which has torch.

{"do": "open", "group": NAME, "world": N}      -> {"port": P}, and when all have joined {"joined": true}
{"do": "send", "model": FOLDER, "scale": X, "names": [...]|null, "dtype": T|null, "flat": bool, "shape": [...]|null,
 "flip": [BYTE, BIT]|null, "times": N}         -> the names, dtypes and shapes; after a {"do": "go"}: {"sent": true} or {"error": TEXT}
{"do": "save", "model": FOLDER, "scale": X, "to": FOLDER}        -> {"saved": true}
{"do": "close"}                                -> {"closed": true}
"""

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

LIMIT = timedelta(seconds=240)
"""Fifty ranks of one process took 34 s to join on a busy machine with two cores, and once more than 100 s."""


def answer(document: dict[str, Any]) -> None:
    print(json.dumps(document), flush=True)


def ask() -> dict[str, Any]:
    line = sys.stdin.readline()
    if not line:
        sys.exit()
    return dict(json.loads(line))


def join(group: str, world: int) -> tuple[Any, Any]:
    server = dist.TCPStore("127.0.0.1", 0, None, True, timeout=LIMIT, wait_for_workers=False)
    answer({"port": server.port})
    prefixed = dist.PrefixStore("cpu/", dist.PrefixStore(f"{group}/", dist.PrefixStore(group, server)))
    options = dist.ProcessGroupGloo._Options()
    options._timeout = LIMIT
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    made = dist.ProcessGroupGloo(prefixed, 0, world, options)
    answer({"joined": True})
    return server, made


def weights(model: str, scale: float, names: list[str] | None = None) -> dict[str, Any]:
    loaded = load_file(f"{model}/model.safetensors")
    return {name: (loaded[name].float() * scale).to(loaded[name].dtype) for name in names or loaded}


def send(
    made: Any,
    model: str,
    scale: float,
    names: list[str] | None = None,
    dtype: str | None = None,
    flat: bool = False,
    shape: list[int] | None = None,
    flip: tuple[int, int] | None = None,
    times: int = 1,
) -> None:
    tensors = weights(model, scale, names)
    if dtype:
        tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    if shape:
        tensors = {name: torch.ones(shape) for name in tensors}
    if flip:
        at, bit = flip
        first = next(iter(tensors.values()))
        first.reshape(-1).view(torch.uint8)[at] ^= 1 << bit
    answer(
        {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
    )
    ask()
    sent = list(tensors.values())
    if flat:
        sent = [torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in sent])]
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    try:
        for work in [made.broadcast([tensor.contiguous()], options) for tensor in sent * times]:
            work.wait()
    except RuntimeError as error:
        answer({"error": str(error)})
    else:
        answer({"sent": True})


def main() -> None:
    torch.set_num_threads(1)
    store = made = None
    while True:
        command = ask()
        action = command.pop("do")
        if action == "open":
            store, made = join(**command)
        elif action == "send":
            send(made, **command)
        elif action == "save":
            Path(command["to"]).mkdir(exist_ok=True)
            save_file(weights(command["model"], command["scale"]), f"{command['to']}/model.safetensors", metadata={"format": "pt"})
            answer({"saved": True})
        else:
            store = made = None  # noqa: F841 - closes the process group
            answer({"closed": True})


if __name__ == "__main__":
    main()
