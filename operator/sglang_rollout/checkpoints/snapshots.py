"""Read snapshots: checkpoints of committed weight versions in one directory. ``publish`` writes them, for the client and the weight store.

<directory>/3-120-step-120/        <run>-<step>-<label>
    snapshot.json                  the manifest: version, time, and size and SHA-256 of each file
    model.safetensors …            the tensors
    config.json  tokenizer.json …  the rest of a folder that SGLang loads: the client copies it from the model
    manifest.json                  digests of all pieces: the weight store writes it to load the version again
<directory>/.writing-…             not complete; never read
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from sglang_rollout.checkpoints.folder import CancelCheck, ProblemsError, read_model

MANIFEST = "snapshot.json"
HIDDEN = "."
"""First character of all names in the directory that are not snapshots."""
_CHUNK = 8 * 1024 * 1024


class FileEntry(BaseModel):
    """One file of a snapshot."""

    model_config = ConfigDict(frozen=True)

    bytes: int
    sha256: str


class Manifest(BaseModel):
    """Content of ``snapshot.json``."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    format: int = 1
    sequence: int
    """Grows with every snapshot of the directory, also across fleets: a new fleet counts its runs from 1."""
    label: str
    """Label of the version, as in every sample's ``weight_version``."""
    run: int
    step: int
    epoch: int
    """Epoch of the fleet at the commit."""
    fleet_id: str = ""
    """ID of the fleet. A recreated fleet has another ID and counts its runs from 1."""
    created: str
    """Time in RFC 3339, UTC."""
    tensors: int
    """Number of tensors."""
    bytes: int
    """Bytes of all tensors."""
    files: dict[str, FileEntry]
    update: str = ""
    """ID of the update that sent the version through a weight store; empty: the client wrote the snapshot."""
    digest: str = ""
    """Digest of the version in the weight store; empty: the client wrote the snapshot."""
    author: str = ""
    """Caller that pushed the version; empty: not known."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A complete snapshot."""

    path: Path
    manifest: Manifest


def list_snapshots(directory: Path | str) -> list[Snapshot]:
    """Return all complete snapshots, oldest first. Ignore folders without a readable manifest."""
    found = []
    try:
        folders = [entry for entry in Path(directory).iterdir() if not entry.name.startswith(HIDDEN)]
    except FileNotFoundError:
        return []
    for folder in folders:
        try:
            found.append(Snapshot(folder, Manifest.model_validate_json((folder / MANIFEST).read_bytes())))
        except (OSError, ValidationError):
            continue
    return sorted(found, key=lambda snapshot: (snapshot.manifest.sequence, snapshot.manifest.created, snapshot.path.name))


def latest_snapshot(directory: Path | str) -> Snapshot | None:
    """Return the newest complete snapshot; None if there is none."""
    found = list_snapshots(directory)
    return found[-1] if found else None


def verify_snapshot(snapshot: Snapshot, *, check_cancelled: CancelCheck = lambda: None) -> None:
    """Read all files and compare them with the manifest. A snapshot of the client must also be a folder that SGLang loads.

    Raises:
        ProblemsError: A file is missing, or differs from the manifest.
    """
    problems = find_changes(snapshot, check_cancelled=check_cancelled)
    if problems:
        raise ProblemsError(problems)
    if not snapshot.manifest.update:
        read_model(snapshot.path, check_cancelled=check_cancelled)


def find_changes(snapshot: Snapshot, *, check_cancelled: CancelCheck = lambda: None) -> list[str]:
    """Read all files, and return how they differ from the manifest, as sentences."""
    problems = []
    for name, wanted in snapshot.manifest.files.items():
        path = snapshot.path / name
        try:
            size, digest = _read_digest(path, check_cancelled)
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror or error}.")
            continue
        if size != wanted.bytes:
            problems.append(f"{path} is {size} bytes long; {MANIFEST} says {wanted.bytes}.")
        elif digest != wanted.sha256:
            problems.append(f"{path} has changed: its SHA-256 differs from {MANIFEST}.")
    return problems


@contextmanager
def lock_snapshot(folder: Path) -> Iterator[None]:
    """Keep a snapshot from being removed inside the block.

    Raises:
        ProblemsError: The snapshot has been removed.
    """
    try:
        descriptor = os.open(folder / MANIFEST, os.O_RDONLY)
    except OSError as error:
        raise ProblemsError([f"The snapshot {folder} is gone: {error.strerror}."]) from None
    try:
        with flock(descriptor, fcntl.LOCK_SH):
            if not (folder / MANIFEST).exists():  # renamed between opening and locking
                raise ProblemsError([f"The snapshot {folder} is gone: a writer has just removed it."])
            yield
    finally:
        os.close(descriptor)


@contextmanager
def flock(descriptor: int, kind: int) -> Iterator[None]:
    """Lock an open file with ``flock`` inside the block. Do nothing on a file system without locks.

    Closing the file does not release the lock while a forked child has a copy of the descriptor.

    Raises:
        BlockingIOError: ``kind`` has ``LOCK_NB``, and another process holds the lock.
    """
    try:
        fcntl.flock(descriptor, kind)
    except BlockingIOError:
        raise
    except OSError:
        yield
        return
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _read_digest(path: Path, check_cancelled: CancelCheck) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            check_cancelled()
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()
