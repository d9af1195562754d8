"""Files that the engine's container and its agent share, all in the folder of the boot file.

The container's start script and hooks write most of them; the agent never writes what describes the engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_rollout.wire.agent import Nccl


class RunFiles:
    """Paths in the folder that the engine's container and its agent share.

    ``drain``: the engine is about to stop (its preStop hook touches the file). ``drained``: no request runs (the hook waits for the file).
    ``kill``: the engine has to restart (its liveness probe fails while the file exists).
    """

    def __init__(self, boot_file: Path) -> None:
        self.boot = boot_file
        self.drain = boot_file.parent / "drain"
        self.drained = boot_file.parent / "drained"
        self.kill = boot_file.parent / "kill"

    def drain_wanted(self) -> bool:
        """Return whether a drain of the current engine is requested. A request older than its start was for the previous engine."""
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
    """Return the NCCL of the engine's container; None without the file.

    The file has a line ``version=…`` and one for each ``NCCL_…`` variable. The agent's own container has another NCCL. SGLang adds a
    variable at its start, which depends on its options ``info``."""
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
    """Return the all-reduce bandwidth in GB/s that the container measured before the start; None if it measured none."""
    try:
        return float(file.read_text())
    except (OSError, ValueError):
        return None
