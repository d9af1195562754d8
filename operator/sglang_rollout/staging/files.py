"""Files of a copy: writes and hashes in threads, replacements that are atomic, deletions that no reader sees half done.

An error of a write becomes a StagedError, because the usual cause is a full volume.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shutil
from collections.abc import AsyncIterable, Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import IO, TypeVar

from sglang_rollout.staging.differences import decode, exclusive_or
from sglang_rollout.staging.index import StagedError, StagedFault

DELETED_PREFIX = ".deleted-"
"""Beginning of the names of folders that are being deleted."""
BATCH_BYTES = 2**20
"""Bytes that are hashed and written in one go of a thread."""
_BATCH_CHUNKS = 512
"""Most buffers of one system call; Linux allows 1024."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_Result = TypeVar("_Result")


class Writing:
    """Context that raises StagedError for an OSError of a write."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError):
            raise StagedError(f"{self._path} cannot be written: {error.strerror or error}.", StagedFault.NO_SPACE) from error


async def finish_in_thread(
    function: Callable[[], _Result], *, executor: Executor | None = None, on_cancel: Callable[[], None] | None = None
) -> _Result:
    """Run a function in a thread. If the caller is cancelled, wait for the thread, so that it writes nothing afterwards.

    Args:
        function: The function. It is short, or ``on_cancel`` ends it.
        executor: Where it runs; None: in the event loop's threads.
        on_cancel: Called when the caller is cancelled, before the wait.
    """
    work = asyncio.get_running_loop().run_in_executor(executor, function)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        while not work.done():
            try:
                await asyncio.wait({work})
            except asyncio.CancelledError:
                continue
        if not work.cancelled():
            work.exception()  # the caller is gone, so no one else retrieves it
        raise


async def write_chunks(path: Path, offset: int, size: int, chunks: AsyncIterable[bytes]) -> str:
    """Write ``size`` bytes as they arrive, and return their SHA-256. Raises StagedError for another number of bytes."""
    hashed, written, arrived = hashlib.sha256(), 0, 0
    batch: list[bytes] = []

    def flush() -> int:
        for chunk in batch:
            hashed.update(chunk)
        return write_at(path, offset + written, batch)

    async for chunk in chunks:
        arrived += len(chunk)
        if arrived > size:
            break
        batch.append(chunk)
        if arrived - written >= BATCH_BYTES or len(batch) >= _BATCH_CHUNKS:
            written += await finish_in_thread(flush)
            batch.clear()
    if arrived != size:
        how = "more" if arrived > size else f"{arrived}"
        raise StagedError(f"A piece of {size} bytes arrived with {how} bytes.", StagedFault.WRONG_BYTES)
    if batch:
        await finish_in_thread(flush)
    return hashed.hexdigest()


def write_at(path: Path, offset: int, buffers: Sequence[bytes | memoryview]) -> int:
    """Write buffers one after another, and return their bytes. Opens the file each time, so that a late thread never holds a closed one."""
    views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    total = 0
    with Writing(path), path.open("r+b", buffering=0) as file:
        while views:
            count = os.pwritev(file.fileno(), views, offset + total)
            total += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if views:
                views[0] = views[0][count:]
    return total


def allocate(path: Path, size: int) -> None:
    """Reserve the space of a file. Blocks; raises StagedError without space."""
    with Writing(path), path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def hash_range(path: Path, offset: int, size: int) -> str:
    """Return the SHA-256 of a part of a file. Blocks; raises StagedError if the file cannot be read."""
    hashed = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while size > 0 and (data := file.read(min(size, BATCH_BYTES))):
                hashed.update(data)
                size -= len(data)
    except OSError as error:
        raise StagedError(f"{path} cannot be read: {error.strerror or error}.", StagedFault.INCOMPLETE) from error
    if size:
        raise StagedError(f"{path} is too short.", StagedFault.INCOMPLETE)
    return hashed.hexdigest()


def patch_range(base: Path, base_offset: int, path: Path, offset: int, size: int, *, difference: bytes) -> str:
    """Write the part of a file that differs from a part of another file, and return its SHA-256. Blocks.

    Args:
        base: The other file.
        base_offset: Where its part begins.
        path: File that is written.
        offset: Where the written part begins.
        size: Bytes of both parts.
        difference: The difference; empty: both parts are equal.

    Raises:
        StagedError: The difference is damaged, or a file cannot be read or written.
    """
    hashed, position = hashlib.sha256(), 0
    try:
        source = base.open("rb", buffering=0)
    except OSError as error:
        raise StagedError(f"{base} cannot be read: {error.strerror or error}.", StagedFault.INCOMPLETE) from error
    with source:
        for block in decode(difference, size):
            held = _read_part(source, base_offset + position, len(block), base)
            data = exclusive_or(held, block) if difference else held
            hashed.update(data)
            write_at(path, offset + position, [data])
            position += len(data)
    return hashed.hexdigest()


def _read_part(file: IO[bytes], offset: int, size: int, path: Path) -> bytes:
    try:
        held = os.pread(file.fileno(), size, offset)
    except OSError as error:
        raise StagedError(f"{path} cannot be read: {error.strerror or error}.", StagedFault.INCOMPLETE) from error
    if len(held) < size:
        raise StagedError(f"{path} is too short.", StagedFault.INCOMPLETE)
    return held


def replace_file(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace a file atomically. Raises StagedError if that fails."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with Writing(path):
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(new, path)


def hide_folder(folder: Path) -> Path:
    """Rename a folder, so that no reader finds it half deleted."""
    hidden = folder.with_name(f"{DELETED_PREFIX}{folder.name}-{secrets.token_hex(4)}")
    folder.rename(hidden)
    return hidden


def delete_folders(folders: Sequence[Path]) -> None:
    """Delete folders with their files. Blocks: a volume in memory needs a second for 20 GB."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def read_boot_id() -> str:
    """Return the ID of this boot of the machine; empty where the kernel gives none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""  # not Linux
