"""Stand-in for Mooncake: reads the memory of another process of this machine. Files in ``MOONCAKE_FAULTS`` make calls fail.

As the library does, it refuses addresses that the other process has not registered, and memory that overlaps other memory. As the library
does, it chooses the transport by its variables and not by an argument. It has a device for RDMA if there is a file ``rdma``.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
import threading
import time
from pathlib import Path


def _registry(process: int) -> Path:
    return Path(tempfile.gettempdir()) / f"stand-in-mooncake-{process}.json"


def _has_fault(name: str) -> bool:
    return (Path(os.environ.get("MOONCAKE_FAULTS", "/nonexistent")) / name).exists()


SUPPORT_EFA = _has_fault("efa")


class TransferEngine:
    """The calls that the project makes. Its port is the ID of its process."""

    def __init__(self) -> None:
        self._registered: dict[int, int] = {}
        self._lock = threading.Lock()

    def initialize(self, host: str, metadata: str, transport: str, device: str) -> int:
        is_forced = "MC_FORCE_HCA" in os.environ and "MC_FORCE_TCP" not in os.environ
        return -1 if _has_fault("initialize") or (is_forced and not _has_fault("rdma")) else 0

    def get_rpc_port(self) -> int:
        return os.getpid()

    def register_memory(self, address: int, size: int) -> int:
        with self._lock:
            if any(address < start + length and start < address + size for start, length in self._registered.items()):
                return -1
            return self._save({**self._registered, address: size})

    def unregister_memory(self, address: int) -> int:
        with self._lock:
            return self._save({start: length for start, length in self._registered.items() if start != address})

    def transfer_sync_read(self, segment: str, target: int, address: int, size: int) -> int:
        if _has_fault("crash"):
            os.abort()
        while _has_fault("hang"):
            time.sleep(0.01)
        process = int(segment.rpartition(":")[2])
        try:
            shared = json.loads(_registry(process).read_text())
            if not any(int(start) <= address and address + size <= int(start) + length for start, length in shared.items()):
                return -1
            with Path(f"/proc/{process}/mem").open("rb", buffering=0) as memory:
                memory.seek(address)
                data = memory.read(size)
        except OSError:
            return -1
        if _has_fault("wrong"):
            data = bytes(size)
        ctypes.memmove(target, data, len(data))
        return 0 if len(data) == size else -1

    def _save(self, registered: dict[int, int]) -> int:
        self._registered = registered
        new = _registry(os.getpid()).with_suffix(".new")
        new.write_text(json.dumps(registered))
        new.rename(_registry(os.getpid()))
        return 0
