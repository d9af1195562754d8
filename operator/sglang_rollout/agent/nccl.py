"""Which NCCL the engine's container has: a file that its start script writes, because this container's own is another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_rollout.wire.agent import Nccl

CUMEM = "NCCL_CUMEM_ENABLE"


def read(file: Path, info: dict[str, Any]) -> Nccl | None:
    """``version=…`` and the environment's ``NCCL_…=…``, a line each; with what SGLang adds to it. None without such a file."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return None
    found = dict(line.split("=", 1) for line in lines if "=" in line)
    version = found.pop("version", "").strip() or None
    settings = {key: value for key, value in found.items() if key.startswith("NCCL_")}
    # SGLang 0.5.23, entrypoints/engine.py, _set_envs_and_config. With these two options it depends on the hardware, too.
    if info.get("enable_symm_mem"):
        settings[CUMEM] = "1"
    elif CUMEM not in settings and info.get("nnodes", 1) == 1 and not info.get("enable_kv_cache_sharding"):
        settings[CUMEM] = "0"
    return Nccl(version=version, settings=settings)
