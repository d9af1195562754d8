"""Tiny models on disk. They are written without the library safetensors, because the product reads them without it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 8,
    "tie_word_embeddings": False,
}
SIZES = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1, "F64": 8}
TENSORS: dict[str, tuple[str, tuple[int, ...]]] = {
    "model.embed_tokens.weight": ("F32", (8, 4)),
    "model.layers.0.mlp.weight": ("F32", (4, 4)),
    "model.norm.weight": ("F32", (4,)),
    "lm_head.weight": ("F32", (8, 4)),
}
INDEX = "model.safetensors.index.json"


def file_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...]]], fill: int = 0, **header: Any) -> bytes:
    """Return the bytes of a safetensors file. ``header`` overrides entries of its header."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = prod(shape) * SIZES[dtype]
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps({**described, **header}).encode()
    return struct.pack("<Q", len(text)) + text + bytes([fill]) * offset


def write_model(
    folder: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] = TENSORS,
    *,
    shards: int = 0,
    fill: int = 0,
    **config: Any,
) -> Path:
    """Write a model as one file, or as ``shards`` files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    if not shards:
        (folder / "model.safetensors").write_bytes(file_bytes(tensors, fill))
        return folder
    weight_map: dict[str, str] = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        (folder / name).write_bytes(file_bytes(part, fill))
        weight_map |= dict.fromkeys(part, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
