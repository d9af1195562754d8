"""Push the model's tensors, multiplied by SCALE, under names with PREFIX: run by the engine environment's Python.

push_names.py URL MODEL VERSION SCALE PREFIX CHECK [MORE [LESS]]    prints one JSON object

CHECK: 0 or 1 (``check_model``); MORE: one more name, or an empty text; LESS: a name that is left out.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import load_file

from sglang_rollout.trainer import PushFailed, connect


def main(url: str, folder: str, version: str, scale: str, prefix: str, check: str, more: str = "", less: str = "") -> None:
    tensors = {name: tensor for file in sorted(Path(folder).glob("*.safetensors")) for name, tensor in load_file(file).items()}
    named = {prefix + name: tensor * float(scale) for name, tensor in tensors.items()}
    if more:
        named[more] = next(iter(named.values()))
    named.pop(less, None)
    with connect(url, timeout=60) as fleet:
        try:
            result = fleet.push(named, version=version, check_model=check == "1")
        except PushFailed as error:
            print(json.dumps({"failed": str(error)}))
            return
        print(json.dumps({"failed": "", **asdict(result)}, default=str))


main(*sys.argv[1:])
