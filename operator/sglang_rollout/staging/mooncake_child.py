"""Child process that loads Mooncake Transfer Engine: shares files with other pods, and reads from theirs.

The native library runs in a process of its own, so that its crash ends neither an agent nor the weight store. ``mooncake`` starts it and
sends it commands, one JSON object per line. Over TCP Mooncake admits other pods to shared files only, and these are mapped read-only.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TextIO

_PR_SET_PDEATHSIG = 1
_PARALLEL = 4
"""Commands at a time."""
_STEP_BYTES = 2**20
"""Bytes that are copied, hashed and written in one go."""
_RDMA = "rdma"


class Memory:
    """Memory of this process that Mooncake has registered.

    Args:
        host: Address of this pod, which other pods use.
        transport: ``rdma`` or ``tcp``.
    """

    def __init__(self, host: str, transport: str) -> None:
        from mooncake import engine  # noqa: PLC0415 - the error of a missing library is an answer

        if transport == _RDMA and getattr(engine, "SUPPORT_EFA", False):
            raise OSError("This build of Mooncake is for EFA, and uses TCP in place of RDMA.")
        self._engine = engine.TransferEngine()
        self._transport = transport
        self._shared: dict[int, int] = {}
        self._buffers: SimpleQueue[mmap.mmap] = SimpleQueue()
        _check(self._engine.initialize(host, "P2PHANDSHAKE", transport, ""), f"Mooncake could not start with {transport} at {host}")
        self.port = int(self._engine.get_rpc_port())

    def share(self, path: str) -> dict[str, int]:
        """Map a file and register it, and return its address; 0 for a file that was deleted."""
        # Mooncake asks a device for RDMA for write access to all memory, which fails with a map that is read-only.
        can_write = self._transport == _RDMA
        try:
            descriptor = os.open(path, os.O_RDWR if can_write else os.O_RDONLY)
        except FileNotFoundError:
            return {"address": 0}
        try:
            size = os.fstat(descriptor).st_size
            address = _map(descriptor, size, mmap.PROT_READ | (mmap.PROT_WRITE if can_write else 0))
        finally:
            os.close(descriptor)
        self._shared[address] = size
        _check(self._engine.register_memory(address, size), f"Mooncake could not register {size} bytes of {path}")
        return {"address": address}

    def unshare(self, address: int) -> dict[str, int]:
        """End the registration and the map of a file."""
        code = self._engine.unregister_memory(address)
        _unmap(address, self._shared.pop(address))
        _check(code, "Mooncake could not end the registration of a file")
        return {}

    def read(self, segment: str, address: int, size: int, path: str, offset: int) -> dict[str, str]:
        """Read a piece from another pod, write it to a file, and return its SHA-256.

        Pods write to one buffer per thread only, never to the file: the digest is that of the bytes that were written. After an error the
        buffer is not used again, because bytes may still arrive in it.
        """
        buffer = self._take_buffer(size)
        _check(self._engine.transfer_sync_read(segment, _address(buffer), address, size), f"Mooncake could not read from {segment}")
        digest = _write(memoryview(buffer)[:size], path, offset)
        self._buffers.put(buffer)
        return {"digest": digest}

    def _take_buffer(self, size: int) -> mmap.mmap:
        with suppress(Empty):
            buffer = self._buffers.get_nowait()
            if len(buffer) >= size:
                return buffer
            _check(self._engine.unregister_memory(_address(buffer)), "Mooncake could not end the registration of a buffer")
            buffer.close()
        made = mmap.mmap(-1, size)
        _check(self._engine.register_memory(_address(made), size), "Mooncake could not register a buffer")
        return made


def _address(buffer: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _check(code: int, what: str) -> None:
    if code:
        raise OSError(f"{what} (code {code}).")


def _write(arrived: memoryview, path: str, offset: int) -> str:
    """Write bytes that may change meanwhile, and return the SHA-256 of what was written."""
    hashed, own = hashlib.sha256(), memoryview(bytearray(_STEP_BYTES))
    with Path(path).open("r+b", buffering=0) as file:
        for start in range(0, len(arrived), _STEP_BYTES):
            part = own[: len(arrived) - start]
            part[:] = arrived[start : start + _STEP_BYTES]
            hashed.update(part)
            position = offset + start
            while part:
                count = os.pwrite(file.fileno(), part, position)
                part, position = part[count:], position + count
    return hashed.hexdigest()


def _map(descriptor: int, size: int, protection: int) -> int:
    """Map a file and return the address. ``mmap.mmap`` does not say the address of a map that is read-only."""
    address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(address)


def _unmap(address: int, size: int) -> None:
    if _libc.munmap(address, size):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _load_libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


_libc = _load_libc()


class Answers:
    """Writes answers, each with the number of its command."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def write(self, number: int, **fields: Any) -> None:
        """Write one answer."""
        with self._lock:
            self._stream.write(json.dumps({"number": number, **fields}) + "\n")
            self._stream.flush()


def obey(memory: Memory, line: str, answers: Answers) -> None:
    """Run one command, and answer it."""
    command = json.loads(line)
    number, action = command.pop("number"), command.pop("do")
    actions: dict[str, Callable[..., dict[str, Any]]] = {"share": memory.share, "unshare": memory.unshare, "read": memory.read}
    try:
        found = actions[action](**command)
    except Exception as error:  # noqa: BLE001 - the parent reports the text and ends this process
        answers.write(number, error=str(error) or type(error).__name__)
    else:
        answers.write(number, **found)


def main() -> None:
    """Obey the parent until it closes the pipe."""
    # The kernel kills this process with its parent, also while a call of the library blocks it.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent, host, transport = sys.argv[1:]
    if os.getppid() != int(parent):
        sys.exit(1)
    answers = Answers(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)  # the library may write to the standard output
    try:
        memory = Memory(host, transport)
    except (ImportError, OSError) as error:
        answers.write(0, error=str(error))
        os._exit(1)
    answers.write(0, port=memory.port)
    with ThreadPoolExecutor(_PARALLEL) as threads:
        for line in sys.stdin:
            threads.submit(obey, memory, line, answers)
    # The end of the library may wait for a lost pod.
    os._exit(0)


if __name__ == "__main__":
    main()
