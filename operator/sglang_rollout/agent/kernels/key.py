"""Key of an archive of compiled kernels: only pods with the same key exchange kernels."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")
_CPU_FIELDS = ("model name", "flags", "Features")
"""Fields of ``/proc/cpuinfo`` that tell which instructions a compiler may use: of x86, and of Arm (``Features``)."""


def kernels_key(spec_hash: str, hardware: Iterable[str]) -> str:
    """Return the key of a pod.

    Args:
        spec_hash: Hash of model, image and parallelism.
        hardware: Result of :func:`read_hardware`.
    """
    return hashlib.sha256(json.dumps([spec_hash, *hardware]).encode()).hexdigest()


def read_hardware(proc: Path = _PROC) -> list[str]:
    """Return what identifies the kind of the node: GPU products and their driver, and the processor with its instructions.

    NVIDIA's driver lists its GPUs in ``/proc``, where containers without GPUs read them, too. Other GPUs are not identified.
    """
    gpus = {_field(file, "Model") for file in sorted((proc / "driver/nvidia/gpus").glob("*/information"))}
    driver = _read(proc / "driver/nvidia/version").partition("\n")[0]
    processor = [_field(proc / "cpuinfo", name) for name in _CPU_FIELDS]
    return [*sorted(gpus), driver, platform.machine(), *processor]


def _field(file: Path, name: str) -> str:
    """Return the first value of a field in lines ``name : value``; empty if there is none."""
    for line in _read(file).splitlines():
        field, colon, value = line.partition(":")
        if colon and field.strip() == name:
            return value.strip()
    return ""


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""  # the node has no such device
