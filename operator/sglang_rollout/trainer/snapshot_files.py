"""Writes one snapshot into a directory, whole or not at all, and removes old ones."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sglang_rollout.checkpoints.folder import CONFIG, INDEX, SINGLE
from sglang_rollout.checkpoints.format import build_header
from sglang_rollout.checkpoints.snapshots import MANIFEST, FileEntry, Manifest, Snapshot, listed, lock
from sglang_rollout.trainer.errors import SnapshotFailed
from sglang_rollout.wire.weights import Version

_COPIED = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
"""Ends of the names of what belongs to a model beside its weights: config, tokenizer, chat template, the model's own code."""
_CHUNK = 16 * 1024 * 1024
_WRITING, _REMOVED, _LOCK = ".writing-", ".removed-", ".lock"
_SPARE_BYTES = 64 * 1024 * 1024
"""Room for what is beside the tensors."""


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """A tensor whose bytes lie in host memory."""

    name: str
    dtype: str
    """The format's name: ``BF16``."""
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class Job:
    """What to write, and where."""

    directory: Path
    model: Path
    """Folder from which config and tokenizer are copied."""
    keep: int
    shard_bytes: int
    version: Version
    epoch: int
    fleet_id: str
    tensors: Sequence[StagedTensor]

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.data.nbytes for tensor in self.tensors)


Alive = Callable[[], None]


def write(job: Job, *, alive: Alive) -> Snapshot:
    """Write, publish, and remove what is too old. Raises SnapshotFailed; then the directory is as before."""
    try:
        with _only_writer(job.directory):
            _clear(job.directory)
            _room_for(job)
            return _publish(job, alive)
    except OSError as error:
        raise SnapshotFailed(_sentence(job, error)) from error


def folder_name(version: Version) -> str:
    """``<run>-<n>-<label>``, with only letters, digits, dot, underscore and hyphen of the label."""
    label = re.sub(r"[^A-Za-z0-9._-]", "_", version.label)[:100]
    return f"{version.run}-{version.step}-{label}"


def _publish(job: Job, alive: Alive) -> Snapshot:
    before = listed(job.directory)
    target = job.directory / folder_name(job.version)
    temporary = job.directory / f"{_WRITING}{target.name}-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        files = _write_model(job, temporary, alive)
        manifest = Manifest(
            sequence=1 + max((snapshot.manifest.sequence for snapshot in before), default=0),
            label=job.version.label,
            run=job.version.run,
            step=job.version.step,
            epoch=job.epoch,
            fleet_id=job.fleet_id,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            tensors=len(job.tensors),
            bytes=job.bytes,
            files=files,
        )
        _save(temporary / MANIFEST, [manifest.model_dump_json(indent=1).encode()], alive)
        _sync(temporary)
        if target.exists() and not _remove(target):
            target = target.with_name(f"{target.name}.{manifest.sequence}")
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(job.directory)
    others = [snapshot.path for snapshot in before if snapshot.path != target]
    for old in others[: -(job.keep - 1) or None]:
        _remove(old)
    return Snapshot(target, manifest)


def _write_model(job: Job, folder: Path, alive: Alive) -> dict[str, FileEntry]:
    files = {}
    for source in sorted(job.model.iterdir()):
        if source.is_file() and source.suffix in _COPIED and source.name not in (INDEX, MANIFEST):
            files[source.name] = _save(folder / source.name, _chunks(source), alive)
    shards = list(_shards(job.tensors, job.shard_bytes))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        header = build_header((tensor.name, tensor.dtype, tensor.shape) for tensor in shard)
        files[name] = _save(folder / name, [header, *(tensor.data for tensor in shard)], alive)
        weight_map |= {tensor.name: name for tensor in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": job.bytes}, "weight_map": weight_map}
        files[INDEX] = _save(folder / INDEX, [json.dumps(index, indent=1).encode()], alive)
    if CONFIG not in files:
        raise SnapshotFailed(f"{job.model / CONFIG} is gone: a snapshot without it cannot be loaded.")
    return files


def _shards(tensors: Sequence[StagedTensor], most: int) -> Iterator[list[StagedTensor]]:
    """Files of at most ``most`` bytes, in the order of the tensors; a larger tensor gets a file for itself."""
    held: list[StagedTensor] = []
    size = 0
    for tensor in tensors:
        if held and size + tensor.data.nbytes > most:
            yield held
            held, size = [], 0
        held.append(tensor)
        size += tensor.data.nbytes
    yield held


def _save(path: Path, parts: Sequence[bytes | memoryview] | Iterator[bytes], alive: Alive) -> FileEntry:
    """Write a file that survives a crash of the machine, and its checksum."""
    made, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for part in parts:
            view = memoryview(part)
            for at in range(0, view.nbytes, _CHUNK):
                alive()
                chunk = view[at : at + _CHUNK]
                file.write(chunk)
                made.update(chunk)
            size += view.nbytes
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(bytes=size, sha256=made.hexdigest())


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _sync(folder: Path) -> None:
    """Make the folder's entries durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _only_writer(directory: Path) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / _LOCK).open("a") as file:
        try:
            lock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SnapshotFailed(f"Another process writes snapshots into {directory}: give each trainer a directory of its own.") from None
        yield


def _clear(directory: Path) -> None:
    """Remove what a writer or remover that died has left behind; nobody else writes here now."""
    for entry in directory.iterdir():
        if entry.name.startswith((_WRITING, _REMOVED)):
            shutil.rmtree(entry, ignore_errors=True)


def _remove(folder: Path) -> bool:
    """Out of sight first, then gone: nobody finds a folder that is half there. False if somebody holds it: it goes with a later one."""
    away = folder.with_name(f"{_REMOVED}{folder.name}-{secrets.token_hex(4)}")
    with ExitStack() as stack:
        with suppress(FileNotFoundError):  # a folder that is no snapshot has no readers that we know of
            manifest = stack.enter_context((folder / MANIFEST).open("rb"))
            try:
                # Held until the folder has its new name: a reader that comes now sees that it is gone.
                lock(manifest.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        folder.rename(away)
    shutil.rmtree(away, ignore_errors=True)
    return True


def _room_for(job: Job) -> None:
    free = shutil.disk_usage(job.directory).free
    if free < job.bytes + _SPARE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _sentence(job: Job, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with suppress(OSError):
            free = shutil.disk_usage(job.directory).free
            return (
                f"The volume of {job.directory} is full: a snapshot takes {job.bytes / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free. "
                "Give it more room, or keep fewer snapshots (the new one is written before an old one goes)."
            )
    return f"The snapshot of {job.version.label} could not be written into {job.directory}: {error.strerror or error}."
