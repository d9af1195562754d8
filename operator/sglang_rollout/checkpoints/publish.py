"""Write snapshots: completely or not at all, one writer per directory, and only the newest are kept.

The client (``trainer.snapshots``) and the weight store (``store.snapshot_writer``) call it; each decides itself which files a snapshot has.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from sglang_rollout.checkpoints.folder import INDEX, CancelCheck
from sglang_rollout.checkpoints.snapshots import MANIFEST, FileEntry, Manifest, Snapshot, flock, list_snapshots

_COPIED = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
"""Suffixes of the files that a model needs beside its weights: config, tokenizer, chat template, the model's own code."""
_CHUNK = 16 * 1024 * 1024
_WRITING, _REMOVED, _LOCK = ".writing-", ".removed-", ".lock"
_SPARE_BYTES = 64 * 1024 * 1024
"""Space for the files beside the tensors."""

WriteFiles = Callable[[Path], Mapping[str, FileEntry]]
"""Writes the files of a snapshot into a folder, durably, and returns their sizes and digests."""
Describe = Callable[[int, Mapping[str, FileEntry]], Manifest]
"""Returns the manifest of a snapshot with this sequence number and these files."""


class DirectoryInUseError(Exception):
    """Another process writes snapshots into the directory."""


def folder_name(run: int, step: int, label: str) -> str:
    """Return ``<run>-<step>-<label>``. Characters other than letters, digits, dot, underscore and hyphen become ``_``."""
    return f"{run}-{step}-{re.sub(r'[^A-Za-z0-9._-]', '_', label)[:100]}"


def utc_now() -> str:
    """Return the time in RFC 3339, UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Make this process the only writer of the directory inside the block. Create the directory if it is missing.

    Raises:
        DirectoryInUseError: Another process writes.
        OSError: The directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        file = stack.enter_context((directory / _LOCK).open("a"))
        try:
            stack.enter_context(flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            raise DirectoryInUseError(f"Another process writes snapshots into {directory}.") from None
        yield


def remove_leftovers(directory: Path) -> None:
    """Remove unfinished folders of processes that died. The caller holds the lock of the directory."""
    for entry in directory.iterdir():
        if entry.name.startswith((_WRITING, _REMOVED)):
            shutil.rmtree(entry, ignore_errors=True)


def check_free_space(directory: Path, needed: int) -> None:
    """Raise OSError if the volume lacks room for this many bytes of tensors and the files beside them."""
    if shutil.disk_usage(directory).free < needed + _SPARE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def describe_os_error(directory: Path, label: str, needed: int, error: OSError) -> str:
    """Return why a snapshot could not be written, and what to do, as a sentence."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with suppress(OSError):
            free = shutil.disk_usage(directory).free
            return (
                f"The volume of {directory} is full: a snapshot takes {needed / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free. "
                "Use a larger volume, or keep fewer snapshots (an old one is removed after the new one is written)."
            )
    return f"The snapshot of {label} could not be written into {directory}: {describe_refusal(error)}"


def describe_refusal(error: OSError) -> str:
    """Return what the volume answered, and what to do if its permissions are the cause, as sentences without a subject."""
    if error.errno not in (errno.EACCES, errno.EPERM):
        return f"{error.strerror or error}."
    what = "give the volume another owner, or set fsGroup in the securityContext of the pod"
    return f"{error.strerror}. User {os.getuid()} may not write there: {what}."


def publish(directory: Path, name: str, *, keep: int, write: WriteFiles, describe: Describe) -> Snapshot:
    """Write a snapshot into a hidden folder, name it when all is on disk, and remove old snapshots. The caller holds the lock.

    Args:
        directory: Directory of all snapshots.
        name: Name of the snapshot's folder. An earlier snapshot of this name is replaced, or stays if a reader uses it.
        keep: Number of the newest snapshots that stay.
        write: Writes the files.
        describe: Returns the manifest.
    """
    before = list_snapshots(directory)
    target = directory / name
    temporary = directory / f"{_WRITING}{target.name}-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        files = write(temporary)
        manifest = describe(1 + max((snapshot.manifest.sequence for snapshot in before), default=0), files)
        write_file(temporary / MANIFEST, [manifest.model_dump_json(indent=1).encode()])
        sync_folder(temporary)
        if target.exists() and not remove_snapshot(target):
            target = target.with_name(f"{target.name}.{manifest.sequence}")
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(directory)
    others = [snapshot.path for snapshot in before if snapshot.path != target]
    for old in others[: -(keep - 1) or None]:
        remove_snapshot(old)
    return Snapshot(target, manifest)


def remove_snapshot(folder: Path) -> bool:
    """Rename to a hidden name, then delete, so that readers never see a partial snapshot.

    Return False if a reader holds the snapshot's lock. A later snapshot removes it then.
    """
    hidden = folder.with_name(f"{_REMOVED}{folder.name}-{secrets.token_hex(4)}")
    with ExitStack() as stack:
        with suppress(FileNotFoundError):  # a folder without a manifest is not a snapshot and has no lock
            manifest = stack.enter_context((folder / MANIFEST).open("rb"))
            try:
                # Held until the folder is renamed, so that a new reader sees that the snapshot is gone.
                stack.enter_context(flock(manifest.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB))
            except BlockingIOError:
                return False
        folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
    return True


def write_file(path: Path, parts: Iterable[bytes | memoryview], check_cancelled: CancelCheck = lambda: None) -> FileEntry:
    """Write a new file durably, and return its size and SHA-256."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for part in parts:
            view = memoryview(part)
            for at in range(0, view.nbytes, _CHUNK):
                check_cancelled()
                chunk = view[at : at + _CHUNK]
                file.write(chunk)
                digest.update(chunk)
            size += view.nbytes
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(bytes=size, sha256=digest.hexdigest())


def copy_model_files(model: Path, folder: Path, check_cancelled: CancelCheck = lambda: None) -> dict[str, FileEntry]:
    """Copy what a model needs beside its weights into a folder."""
    return {
        source.name: write_file(folder / source.name, read_chunks(source), check_cancelled)
        for source in sorted(model.iterdir())
        if source.is_file() and source.suffix in _COPIED and source.name not in (INDEX, MANIFEST)
    }


def read_chunks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file."""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def sync_folder(folder: Path) -> None:
    """Make the entries of a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
