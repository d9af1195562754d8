"""Snapshots of versions on disk, as copies: read where they lie, or load into another copy. Every piece is checked against its digest.

The weight store writes them (``store.snapshot_writer``). Beside the files of every snapshot such a folder has the index of the version.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from pydantic import ValidationError

from sglang_rollout.checkpoints.snapshots import Snapshot
from sglang_rollout.staging.copies import MANIFEST, Copy, Manifest
from sglang_rollout.staging.index import StagedError, StagedFault
from sglang_rollout.staging.volume import LOAD_SECONDS, Volume
from sglang_rollout.wire.states import Version

PARALLEL_PIECES = 4
"""Pieces that are read at a time."""


class SnapshotCopy(Copy):
    """A snapshot of a weight store as a complete copy that can only be read.

    Args:
        update: ID of the update of the version.
        folder: Folder of the snapshot.
        ticket: Ticket that readers must present.
        volume: Threads that read its files.
    """

    def __init__(self, update: str, folder: Path, ticket: str, volume: Volume) -> None:
        super().__init__(update, folder, ticket, 0)
        self.volume = volume


def open_snapshot(snapshot: Snapshot, volume: Volume, ticket: str = "") -> SnapshotCopy:
    """Open a snapshot. Blocks; call it with :meth:`.Volume.run`.

    Raises:
        StagedError: A file is missing or has another length, or the index is not that of the snapshot's digest (``WRONG_DIGEST``); or the
            volume fails (``LATE``).
    """
    described, folder = snapshot.manifest, snapshot.path
    copy = SnapshotCopy(described.update, folder, ticket, volume)
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
        copy.restore(manifest)
    except FileNotFoundError as error:
        raise _damaged(folder, f"{Path(error.filename or MANIFEST).name} is missing") from error
    except OSError as error:
        raise _unread(folder, error) from error
    except (ValidationError, StagedError) as error:
        raise _damaged(folder, str(error).splitlines()[0]) from error
    if copy.index.end is None or copy.index.end.digest != described.digest:
        raise _damaged(folder, f"{MANIFEST} describes another version than {described.digest[:12]}…")
    copy.version = Version(run=described.run, step=described.step, label=described.label)
    return copy


async def load_pieces(source: SnapshotCopy, copy: Copy) -> None:
    """Copy all shards and pieces of a snapshot. Pieces that have arrived are not read again. Does not seal the copy.

    Raises:
        StagedError: The snapshot is damaged (``WRONG_DIGEST``), the volume fails or does not answer (``LATE``), there is no space, or the
            copy was deleted meanwhile.
    """
    if copy.index.shards and copy.index.shards != source.index.shards[: len(copy.index.shards)]:
        await copy.reset()
    for shard in source.index.shards[len(copy.index.shards) :]:
        copy.add_shard(shard)
    pieces = iter(source.index.digests.items())

    async def load_some() -> None:
        for (shard, piece), digest in pieces:
            try:
                await copy.receive_piece(shard, piece, digest, source.volume.read(*source.piece_location(shard, piece), LOAD_SECONDS))
            except (OSError, StagedError) as error:
                raise _describe(source, shard, piece, error) from error

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(PARALLEL_PIECES):
                group.create_task(load_some())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors


def _describe(source: Copy, shard: int, piece: int, error: OSError | StagedError) -> StagedError:
    """Return the error of a piece that cannot be copied."""
    file = source.piece_location(shard, piece)[0].name
    if isinstance(error, FileNotFoundError):
        return _damaged(source.folder, f"{file} is missing")
    if isinstance(error, OSError):
        return _unread(source.folder, error)
    if error.fault is StagedFault.WRONG_BYTES:
        return _damaged(source.folder, f"piece {piece} of {file} does not have its SHA-256")
    return error


def _unread(folder: Path, error: OSError) -> StagedError:
    return StagedError(f"The snapshot {folder.name} cannot be read: {error.strerror or error}.", StagedFault.LATE)


def _damaged(folder: Path, problem: str) -> StagedError:
    return StagedError(f"The snapshot {folder.name} is damaged: {problem.rstrip('.')}.", StagedFault.WRONG_DIGEST)
