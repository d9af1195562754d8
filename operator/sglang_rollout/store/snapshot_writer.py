"""Child process that writes one snapshot, or verifies one, at the lowest priority: a volume that hangs never holds up the weight store.

It reads one job from the standard input, and writes one result to the standard output. It never imports torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import Field

from sglang_rollout.checkpoints.folder import INDEX
from sglang_rollout.checkpoints.publish import (
    DirectoryInUseError,
    check_free_space,
    describe_os_error,
    folder_name,
    lock_directory,
    publish,
    remove_leftovers,
    utc_now,
    write_file,
)
from sglang_rollout.checkpoints.snapshots import FileEntry, Snapshot, find_changes, list_snapshots
from sglang_rollout.checkpoints.snapshots import Manifest as SnapshotManifest
from sglang_rollout.staging.copies import MANIFEST, Manifest, shard_file
from sglang_rollout.staging.index import shard_bytes, shard_header
from sglang_rollout.wire import Message
from sglang_rollout.wire.states import Version

_PR_SET_PDEATHSIG = 1
_CHUNK = 16 * 1024 * 1024


class WriteJob(Message):
    """A snapshot to write."""

    directory: Path
    """Directory of all snapshots."""
    keep: int
    """Number of the newest snapshots that stay."""
    source: Path
    """Folder of the complete copy."""
    update: str
    version: Version
    digest: str
    bytes: int
    author: str = ""
    epoch: int = 0
    fleet_id: str = ""


class VerifyJob(Message):
    """A snapshot to verify."""

    snapshot: Path


class Job(Message):
    """What the process does; exactly one field is set."""

    write: WriteJob | None = None
    verify: VerifyJob | None = None


class Result(Message):
    """How it ended."""

    problems: list[str] = Field(default_factory=list)
    """Why the snapshot could not be written, or what differs, as sentences; empty: all is well."""


def write_snapshot(job: WriteJob) -> Snapshot:
    """Write a snapshot completely or not at all, then remove old ones.

    Raises:
        DirectoryInUseError: Another process writes into the directory.
        OSError: The copy is gone, or the snapshot could not be written. The directory is unchanged.
    """
    manifest = Manifest.model_validate_json((job.source / MANIFEST).read_bytes())
    shards = [entry.shard for entry in manifest.entries if entry.shard is not None]
    weights = {tensor.name: shard_file(number) for number, shard in enumerate(shards) for tensor in shard.tensors}

    def write(folder: Path) -> Mapping[str, FileEntry]:
        sizes = {shard_file(number): len(shard_header(shard)) + shard_bytes(shard) for number, shard in enumerate(shards)}
        files = {name: write_file(folder / name, _read(job.source / name, size)) for name, size in sizes.items()}
        index = {"metadata": {"total_size": job.bytes}, "weight_map": weights}
        files[INDEX] = write_file(folder / INDEX, [json.dumps(index, indent=1).encode()])
        files[MANIFEST] = write_file(folder / MANIFEST, [manifest.model_dump_json(exclude_none=True).encode()])
        return files

    def describe(sequence: int, files: Mapping[str, FileEntry]) -> SnapshotManifest:
        version = job.version
        return SnapshotManifest(
            sequence=sequence, label=version.label, run=version.run, step=version.step, epoch=job.epoch, fleet_id=job.fleet_id,
            created=utc_now(), tensors=len(weights), bytes=job.bytes, files=dict(files),
            update=job.update, digest=job.digest, author=job.author,
        )  # fmt: skip

    with lock_directory(job.directory):
        remove_leftovers(job.directory)
        check_free_space(job.directory, job.bytes)
        name = folder_name(job.version.run, job.version.step, job.version.label)
        return publish(job.directory, name, keep=job.keep, write=write, describe=describe)


def _read(path: Path, size: int) -> Iterator[bytes]:
    """Yield the first ``size`` bytes of a file. Raises OSError if it has fewer.

    Opens the file for each part, so that the memory of a copy that is deleted meanwhile is free at once.
    """
    offset = 0
    while offset < size:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            data = file.read(min(_CHUNK, size - offset)) or b""
        if not data:
            raise OSError(f"{path} has {offset} bytes, not {size}")
        offset += len(data)
        yield data


def run(job: Job) -> Result:
    """Do a job, and return how it ended."""
    if job.write is not None:
        problem = _write(job.write)
        return Result(problems=[problem] if problem else [])
    if job.verify is not None:
        folder = job.verify.snapshot
        found = next((each for each in list_snapshots(folder.parent) if each.path == folder), None)
        return Result(problems=find_changes(found) if found is not None else [f"{folder} is gone, or its manifest cannot be read."])
    return Result()


def _write(job: WriteJob) -> str:
    """Write a snapshot. Returns why it could not be written, as a sentence; empty if it is on disk."""
    try:
        write_snapshot(job)
    except DirectoryInUseError as error:
        return f"{error} Give each weight store and each trainer its own directory."
    except OSError as error:
        if not job.source.exists():
            return describe_dropped(job.version)
        return describe_os_error(job.directory, job.version.label, job.bytes, error)
    return ""


def describe_dropped(version: Version) -> str:
    """Return why a snapshot was given up whose version was deleted from the store, as a sentence."""
    return (
        f"The snapshot of {version.label} was given up, because a later update needed the room before it was written."
        " The volume is too slow for the time between two updates: use a faster one."
    )


def main() -> None:
    """Do one job."""
    # The kernel kills this process with its parent.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
    os.nice(19)  # the priority of its reads and writes follows
    result = run(Job.model_validate_json(sys.stdin.readline()))
    sys.stdout.write(result.model_dump_json() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
