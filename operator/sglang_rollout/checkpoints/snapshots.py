"""Snapshots: checkpoints of committed weight versions in one directory, for whoever reads them. ``trainer.snapshot`` writes them.

<directory>/3-120-step-120/        <run>-<n>-<label>: a folder that SGLang loads
    snapshot.json                  its manifest: version, time, and size and SHA-256 of each file
    model.safetensors  config.json  tokenizer.json  …
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

from sglang_rollout.checkpoints.folder import Alive, ProblemsError, read_model

MANIFEST = "snapshot.json"
HIDDEN = "."
"""First character of everything in the directory that is no snapshot."""
_CHUNK = 8 * 1024 * 1024


class FileEntry(BaseModel):
    """One file of a snapshot."""

    model_config = ConfigDict(frozen=True)

    bytes: int
    sha256: str


class Manifest(BaseModel):
    """``snapshot.json``."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    format: int = 1
    sequence: int
    """Grows with every snapshot of the directory, whatever the fleet counts: a new fleet begins with run 1 again."""
    label: str
    """The version, as in every sample's ``weight_version``."""
    run: int
    step: int
    epoch: int
    """Of the fleet when it committed the version."""
    fleet_id: str = ""
    """Of the fleet: one that was made anew counts its runs from 1 again."""
    created: str
    """RFC 3339, UTC."""
    tensors: int
    bytes: int
    """Of all tensors."""
    files: dict[str, FileEntry]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A complete snapshot."""

    path: Path
    manifest: Manifest


def listed(directory: Path | str) -> list[Snapshot]:
    """All complete snapshots, oldest first. What cannot be read is left out: it is being removed, or is none of ours."""
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


def latest(directory: Path | str) -> Snapshot | None:
    """The newest complete snapshot; None if there is none."""
    found = listed(directory)
    return found[-1] if found else None


def verify(snapshot: Snapshot, *, alive: Alive = lambda: None) -> None:
    """Read everything and compare it with the manifest. Raises ProblemsError, each problem a sentence."""
    problems = []
    for name, wanted in snapshot.manifest.files.items():
        path = snapshot.path / name
        try:
            size, digest = _read(path, alive)
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror or error}.")
            continue
        if size != wanted.bytes:
            problems.append(f"{path} is {size} bytes long, {MANIFEST} says {wanted.bytes}.")
        elif digest != wanted.sha256:
            problems.append(f"{path} does not have the SHA-256 that {MANIFEST} says: its content has changed.")
    if problems:
        raise ProblemsError(problems)
    read_model(snapshot.path, alive=alive)


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Keep a snapshot from being removed for the length of the block. Raises ProblemsError if it is gone already."""
    try:
        descriptor = os.open(folder / MANIFEST, os.O_RDONLY)
    except OSError as error:
        raise ProblemsError([f"The snapshot {folder} is gone: {error.strerror}."]) from None
    try:
        lock(descriptor, fcntl.LOCK_SH)
        if not (folder / MANIFEST).exists():  # renamed between opening and locking
            raise ProblemsError([f"The snapshot {folder} is gone: it has just been removed."])
        yield
    finally:
        os.close(descriptor)


def lock(descriptor: int, kind: int) -> None:
    """``flock``. Raises BlockingIOError where it must not wait; a file system without locks is not a reason to do nothing."""
    try:
        fcntl.flock(descriptor, kind)
    except BlockingIOError:
        raise
    except OSError:
        return


def _read(path: Path, alive: Alive) -> tuple[int, str]:
    made, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            alive()
            made.update(chunk)
            size += len(chunk)
    return size, made.hexdigest()
