"""Reading safetensors files, without torch: a folder's tensors as bytes."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from sglang_rollout.testing.weights import Held

_TYPES = {
    "BOOL": "bool", "I8": "int8", "U8": "uint8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I16": "int16", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "F32": "float32", "I64": "int64", "F64": "float64",
}  # fmt: skip


class Incomplete(Exception):
    """A file is no complete safetensors file."""


def read_folder(folder: Path) -> dict[str, Held]:
    """All tensors of a folder's ``*.safetensors``. Raises FileNotFoundError when there is none, Incomplete when one is cut off."""
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not folder.is_dir():
        raise FileNotFoundError(f"Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{folder}'.")
    if not files:
        raise FileNotFoundError(f"Cannot find any model weights with `{folder}`")
    tensors: dict[str, Held] = {}
    for file in files:
        tensors.update(read_file(file))
    return tensors


def read_file(file: Path) -> dict[str, Held]:
    """The tensors of one file: 8 bytes length, a JSON header, the bytes."""
    data = file.read_bytes()
    try:
        (length,) = struct.unpack("<Q", data[:8])
        header: dict[str, Any] = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        found = {}
        for name, entry in header.items():
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            if end > len(data):
                raise Incomplete(f"{file} ends at byte {len(data)}, and tensor {name} at {end}")
            found[name] = Held(_TYPES[entry["dtype"]], tuple(entry["shape"]), data[start:end])
    except (struct.error, ValueError, KeyError) as error:
        raise Incomplete(f"{file} is no safetensors file: {error}") from error
    return found
