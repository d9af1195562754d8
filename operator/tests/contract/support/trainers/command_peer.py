"""A trainer's part of weight updates, commanded by lines of JSON; run by the engine environment's Python, which has torch.

{"do": "open", "group": NAME, "world": N, "how": "rendezvous"|"stateless"}
                                               -> {"port": P}, and when all have joined {"joined": true}
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
from safetensors.torch import load_file, save_file

from sglang_rollout.testing.trainer_group import broadcast, choose_port, close_group, open_group, open_stateless_group

LIMIT = timedelta(seconds=240)
"""Fifty ranks of one process took 34 s to join on a busy machine with two cores, and once more than 100 s."""


def answer(document: dict[str, Any]) -> None:
    print(json.dumps(document), flush=True)


def ask() -> dict[str, Any]:
    line = sys.stdin.readline()
    if not line:
        sys.exit()
    return dict(json.loads(line))


def join(group: str, world: int, how: str = "rendezvous") -> Any:
    """Open a process group. ``how``: ``rendezvous`` as most frameworks do, or ``stateless``."""
    port, opener = choose_port(), open_stateless_group if how == "stateless" else open_group
    answer({"port": port})
    made = opener(host="127.0.0.1", port=port, group=group, world_size=world, timeout=LIMIT)
    answer({"joined": True})
    return made


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
    try:
        broadcast(made, sent * times)
    except RuntimeError as error:
        answer({"error": str(error)})
    else:
        answer({"sent": True})


def main() -> None:
    torch.set_num_threads(1)
    made = None
    while True:
        command = ask()
        action = command.pop("do")
        if action == "open":
            close_group(made)
            made = join(**command)
        elif action == "send":
            send(made, **command)
        elif action == "save":
            Path(command["to"]).mkdir(exist_ok=True)
            save_file(weights(command["model"], command["scale"]), f"{command['to']}/model.safetensors", metadata={"format": "pt"})
            answer({"saved": True})
        else:
            close_group(made)
            made = None
            answer({"closed": True})


if __name__ == "__main__":
    main()
