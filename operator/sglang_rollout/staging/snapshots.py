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
from sglang_rollout.staging.volume import IN_MEMORY, Volume
from sglang_rollout.wire.states import Version

PARALLEL_PIECES = 4
"""Pieces that are read at a time."""


def open_snapshot(snapshot: Snapshot, volume: Volume, ticket: str = "") -> Copy:
    """Return a snapshot of a weight store as a complete copy that can only be read. Blocks; call it with :meth:`.Volume.run`.

    Raises:
        StagedError: A file is missing or has another length, or the index is not that of the snapshot's digest.
    """
    described, folder = snapshot.manifest, snapshot.path
    copy = Copy(described.update, folder, ticket, 0)
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
        copy.restore(manifest)
    except (OSError, ValidationError, StagedError) as error:
        raise _damaged(folder, str(error).splitlines()[0]) from error
    if copy.index.end is None or copy.index.end.digest != described.digest:
        raise _damaged(folder, f"{MANIFEST} describes another version than {described.digest[:12]}…")
    copy.volume = volume
    copy.version = Version(run=described.run, step=described.step, label=described.label)
    return copy


async def load_pieces(source: Copy, copy: Copy) -> None:
    """Copy all shards and pieces of a complete copy from disk. Pieces that have arrived are not read again. Does not seal the copy.

    Raises:
        StagedError: Bytes on disk do not have their digest (``WRONG_DIGEST``), there is no space, or the copy was deleted meanwhile.
    """
    if copy.index.shards and copy.index.shards != source.index.shards[: len(copy.index.shards)]:
        await copy.reset()
    for shard in source.index.shards[len(copy.index.shards) :]:
        copy.add_shard(shard)
    pieces = iter(source.index.digests.items())

    async def load_some() -> None:
        for (shard, piece), digest in pieces:
            await _load_piece(source, copy, shard, piece, digest)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(PARALLEL_PIECES):
                group.create_task(load_some())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors


async def _load_piece(source: Copy, copy: Copy, shard: int, piece: int, digest: str) -> None:
    path, offset, size = source.piece_location(shard, piece)
    try:
        await copy.receive_piece(shard, piece, digest, (source.volume or IN_MEMORY).read(path, offset, size, None))
    except OSError as error:
        raise _damaged(source.folder, f"{path.name} cannot be read: {error.strerror or error}") from error
    except StagedError as error:
        if error.fault is StagedFault.WRONG_BYTES:
            raise _damaged(source.folder, f"piece {piece} of {path.name} does not have its SHA-256") from error
        raise


def _damaged(folder: Path, problem: str) -> StagedError:
    return StagedError(f"The snapshot {folder.name} is damaged: {problem.rstrip('.')}.", StagedFault.WRONG_DIGEST)
