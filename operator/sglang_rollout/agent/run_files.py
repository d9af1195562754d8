"""Files that the engine's container and its agent share, all in the folder of the boot file.

The container's start script and hooks write most of them; the agent never writes what describes the engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_rollout.wire.agent import Nccl


class RunFiles:
    """The shared folder, which is the boot file's.

    ``drain``: the engine is about to be stopped (its preStop hook touches it). ``drained``: nothing runs on it any more (the hook waits for
    it). ``kill``: the engine is stuck for good (its liveness probe fails while it exists).
    """

    def __init__(self, boot_file: Path) -> None:
        self.boot = boot_file
        self.drain = boot_file.parent / "drain"
        self.drained = boot_file.parent / "drained"
        self.kill = boot_file.parent / "kill"

    def drain_wanted(self) -> bool:
        """Whether the engine that runs now is to be drained; a request older than the engine's start was for the one before it."""
        try:
            asked = self.drain.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        try:
            return asked >= self.boot.stat().st_mtime_ns
        except FileNotFoundError:
            return True


_CUMEM = "NCCL_CUMEM_ENABLE"


def read_nccl(file: Path, info: dict[str, Any]) -> Nccl | None:
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
        settings[_CUMEM] = "1"
    elif _CUMEM not in settings and info.get("nnodes", 1) == 1 and not info.get("enable_kv_cache_sharding"):
        settings[_CUMEM] = "0"
    return Nccl(version=version, settings=settings)


def read_all_reduce(file: Path) -> float | None:
    """GB/s; None where nothing was measured."""
    try:
        return float(file.read_text())
    except (OSError, ValueError):
        return None
