"""Versions in a folder: one safetensors file per shard, and a manifest once the version is complete.

A store and every agent hold :class:`Copies`. Only the event loop changes an index; bytes are hashed and written in threads. Nothing is
flushed to disk, so a copy is trusted only in the boot of the machine that wrote it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import AsyncIterable, Awaitable, Callable
from pathlib import Path

from pydantic import Field, ValidationError

from sglang_rollout.json_text import load_json
from sglang_rollout.staging.files import (
    DELETED_PREFIX,
    Writing,
    allocate,
    delete_folders,
    finish_in_thread,
    hash_range,
    hide_folder,
    patch_range,
    read_boot_id,
    replace_file,
    write_at,
    write_chunks,
)
from sglang_rollout.staging.index import Index, StagedError, StagedFault, piece_count, piece_offset, shard_bytes, shard_header, too_large
from sglang_rollout.staging.kept_differences import KeptDifferences
from sglang_rollout.wire import Message
from sglang_rollout.wire.staged import UPDATE_PATTERN, IndexEntry, Piece, Shard, StagedCopy, VersionEnd
from sglang_rollout.wire.states import Version

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
TICKETS = "tickets.json"
DIFFERENCES = "differences"
"""Folder of the differences by which the pieces of a version arrived, in the folder of the version."""


class Manifest(Message):
    """``manifest.json``: it is written last, so its existence means that the copy is complete."""

    entries: list[IndexEntry] = Field(min_length=2)
    """The index; its last entry is the end."""
    version: Version | None = None
    boot: str = ""
    """Boot of the machine in which the files were written."""


def shard_file(shard: int) -> str:
    """Return the name of a shard's file."""
    return f"{shard:05d}.safetensors"


class Copy:
    """One version in a folder.

    Args:
        update: ID of the update that brings the version.
        folder: Folder of the files.
        ticket: Ticket that readers must present.
        size_limit: Most bytes of all tensors.
    """

    def __init__(self, update: str, folder: Path, ticket: str, size_limit: int) -> None:
        self.update = update
        self.folder = folder
        self.ticket = ticket
        self.size_limit = size_limit
        self.index = Index()
        self.version: Version | None = None
        self.is_deleted = False
        self.transferred = 0
        """Bytes that were sent to this process for the copy. A difference counts with its own size; an equal piece counts 0."""
        self.differences = KeptDifferences(folder / DIFFERENCES)
        self.failure = ""
        """Why nothing more arrives, as a sentence; empty while the copy may grow."""
        self.bytes_received = 0
        """Bytes that were read from other pods or from a trainer, also those of unfinished pieces."""
        self._counting = threading.Lock()
        self._data_starts: list[int] = []
        self._locks: dict[tuple[int, int], asyncio.Lock] = {}
        self._touched: dict[tuple[int, int], int] = {}
        """Bytes of each piece whose space has been taken, or is being taken."""
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def is_complete(self) -> bool:
        """True if all pieces and the end are there."""
        return self.index.end is not None

    @property
    def files(self) -> list[str]:
        """Names of the shards' files, in order."""
        return [shard_file(shard) for shard in range(len(self.index.shards))]

    @property
    def file_sizes(self) -> list[int]:
        """Bytes of the shards' files, headers included, in order."""
        return [start + size for start, size in zip(self._data_starts, self.index.sizes, strict=True)]

    def status(self) -> StagedCopy:
        """Return what statuses say about the copy."""
        digest = self.index.end.digest if self.index.end else ""
        return StagedCopy(
            update=self.update,
            version=self.version,
            bytes=self.index.bytes_arrived,
            digest=digest,
            transferred=self.transferred,
            received=self.bytes_received,
        )

    def shard_path(self, shard: int) -> Path:
        """Return the path of a shard's file."""
        return self.folder / shard_file(shard)

    def data_start(self, shard: int) -> int:
        """Return the offset of the first tensor's bytes in a shard's file."""
        return self._data_starts[shard]

    def piece_location(self, shard: int, piece: int) -> tuple[Path, int, int]:
        """Return file, offset and bytes of a piece. Raises StagedError if the version does not have the piece."""
        size = self.index.piece_size(shard, piece)
        return self.shard_path(shard), self._data_starts[shard] + piece_offset(piece), size

    # Receive

    def add_shard(self, shard: Shard) -> None:
        """Create the file of the next shard. Raises StagedError for a malformed shard, above the limit, and without space."""
        self._check_open()
        if self.is_complete:
            raise StagedError(f"The version of update {self.update} is complete, so no shard can follow.")
        header, size = shard_header(shard), shard_bytes(shard)
        self._check_size(size)
        path = self.shard_path(len(self.index.shards))
        with Writing(path):
            path.write_bytes(header)
            os.truncate(path, len(header) + size)
        self._data_starts.append(len(header))
        self.index.add(IndexEntry(shard=shard))
        self._wake_waiters()

    async def receive_piece(self, shard: int, piece: int, digest: str, chunks: AsyncIterable[bytes]) -> bool:
        """Write a piece as its bytes arrive. Return False, without reading, if the piece is there already.

        Raises:
            StagedError: The bytes have another digest or length, the piece is there with another digest, or there is no space.
        """
        added = await self.fill_piece(shard, piece, digest, lambda path, offset, size: write_chunks(path, offset, size, chunks))
        self.transferred += self.index.piece_size(shard, piece) if added else 0
        return added

    async def patch_piece(self, shard: int, piece: int, digest: str, base: Copy, difference: bytes) -> bool:
        """Write a piece that differs from the same piece of a complete copy, and keep the difference. Return False if it is there already.

        Raises:
            StagedError: The difference is damaged, the result has another digest, ``base`` has no such piece, or there is no space.
        """
        source, start, _ = base.piece_location(shard, piece)

        async def write(path: Path, offset: int, size: int) -> str:
            found = await finish_in_thread(lambda: patch_range(source, start, path, offset, size, difference=difference))
            if found == digest:
                await self.keep_difference(base, shard, piece, difference)
            return found

        added = await self.fill_piece(shard, piece, digest, write)
        self.transferred += len(difference) if added else 0
        return added

    async def keep_difference(self, base: Copy, shard: int, piece: int, difference: bytes) -> None:
        """Keep a difference from a complete copy for other pods. Call it before the piece enters the index, which tells them of it.

        Pods that have ``base`` need no difference for an equal piece.
        """
        if difference and base.index.end is not None:
            await self.differences.put(base.index.end.digest, shard, piece, difference, self.size_limit - self.index.bytes)

    async def fill_piece(self, shard: int, piece: int, digest: str, write: Callable[[Path, int, int], Awaitable[str]]) -> bool:
        """Let ``write`` write a piece. Return False, without calling it, if the piece is there already.

        Two callers with the same piece take turns. Bytes that do not have the digest never count as arrived.

        Args:
            shard: Number of the shard.
            piece: Number of the piece.
            digest: SHA-256 that the piece must have.
            write: Writes all bytes, given the file, their offset and their number, and returns their SHA-256.

        Raises:
            StagedError: The bytes have another digest, the piece is there with another digest, or there is no space.
        """
        path, offset, size = self.piece_location(shard, piece)
        index = self.index
        async with self._locks.setdefault((shard, piece), asyncio.Lock()):
            self._check_open(index)
            if (shard, piece) in index.digests:
                return self._add_piece(shard, piece, digest)
            self._touched[shard, piece] = size
            try:
                found = await write(path, offset, size)
            except StagedError:
                self._check_open(index)  # the file may be gone for this reason
                raise
            self._check_open(index)
            if found != digest:
                message = (
                    f"Piece {piece} of shard {shard} arrived with other bytes than announced: SHA-256 {found[:12]}…, not {digest[:12]}…."
                )
                raise StagedError(message, StagedFault.WRONG_BYTES)
            return self._add_piece(shard, piece, digest)

    def write_piece(self, shard: int, piece: int, data: bytes | memoryview, digest: str) -> bool:
        """Write a piece that is in memory, and return False if it is there already. Blocks: for pieces that are small or few."""
        self._check_open()
        path, offset, size = self.piece_location(shard, piece)
        if (shard, piece) in self.index.digests:
            return self._add_piece(shard, piece, digest)
        if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
            message = f"Piece {piece} of shard {shard} does not have the announced SHA-256, or has {len(data)} bytes and not {size}."
            raise StagedError(message, StagedFault.WRONG_BYTES)
        self._touched[shard, piece] = size
        write_at(path, offset, [data])
        return self._add_piece(shard, piece, digest)

    async def allocate(self, shard: int) -> None:
        """Reserve the space of a shard's file, because another process writes to a map of it. Raises StagedError without space."""
        path, size = self.shard_path(shard), self.file_sizes[shard]
        for piece in range(piece_count(self.index.sizes[shard])):
            self._touched[shard, piece] = self.index.piece_size(shard, piece)
        await finish_in_thread(lambda: allocate(path, size))

    async def confirm_piece(self, shard: int, piece: int) -> Piece:
        """Hash a piece that another process has written to the file, and enter it into the index."""
        path, offset, size = self.piece_location(shard, piece)
        index = self.index
        self._check_open(index)
        try:
            digest = await finish_in_thread(lambda: hash_range(path, offset, size))
        except StagedError:
            self._check_open(index)
            raise
        self._check_open(index)
        self.transferred += size if self._add_piece(shard, piece, digest) else 0
        return Piece(shard=shard, piece=piece, digest=digest)

    def seal(self, version: Version | None = None) -> VersionEnd:
        """Declare the copy complete, and write its manifest. May be repeated, for a version that was not known before.

        Raises:
            StagedError: Pieces are missing, or the manifest cannot be written.
        """
        self._check_open()
        end = self.index.seal()
        self._wake_waiters()
        if (version is not None and version != self.version) or not (self.folder / MANIFEST).exists():
            self.version = version or self.version
            manifest = Manifest(entries=self.index.entries, version=self.version, boot=read_boot_id())
            replace_file(self.folder / MANIFEST, manifest.model_dump_json(exclude_none=True))
        return end

    async def reset(self) -> None:
        """Delete all shards and pieces, because they are not what the version should be. Readers that have opened a file keep it."""
        self._check_open()
        with Writing(self.folder):
            hidden = hide_folder(self.folder)
            self.folder.mkdir()
        self.index, self.differences = Index(), KeptDifferences(self.folder / DIFFERENCES)
        self._data_starts.clear()
        self._locks.clear()
        self._touched.clear()
        self._wake_waiters()
        await finish_in_thread(lambda: delete_folders([hidden]))

    def restore(self, manifest: Manifest) -> None:
        """Take over the files of an earlier process. Raises StagedError if they are not what the manifest describes."""
        for entry in manifest.entries:
            self.index.add(entry)
            if entry.shard is not None:
                self._data_starts.append(len(shard_header(entry.shard)))
        if self.index.end is None:
            raise StagedError(f"{self.folder / MANIFEST} has no end.")
        for name, size in zip(self.files, self.file_sizes, strict=True):
            found = (self.folder / name).stat().st_size if (self.folder / name).is_file() else -1
            if found != size:
                raise StagedError(f"{self.folder / name} has {found} bytes, not {size}.")
        self.version = manifest.version
        delete_folders([self.folder / DIFFERENCES])  # it is not known from which version they differ

    # Follow

    async def wait_for_entries(self, position: int, seconds: float) -> None:
        """Return when the index has more than ``position`` entries, nothing more arrives, the copy is deleted or reset, or time is up."""
        loop, index = asyncio.get_running_loop(), self.index
        deadline = loop.time() + seconds
        while len(index.entries) <= position and not self.failure and self._is_open(index) and (left := deadline - loop.time()) > 0:
            waiter = loop.create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait({waiter}, timeout=left)
            finally:
                self._waiters.discard(waiter)

    def note_bytes(self, count: int) -> None:
        """Count bytes that have arrived. Threads may call it."""
        with self._counting:
            self.bytes_received += count

    def note_failure(self, failure: str) -> None:
        """Tell readers that nothing more arrives, so that they turn to another pod. An empty text: the copy may grow again."""
        self.failure = failure
        self._wake_waiters()

    def mark_deleted(self) -> None:
        """End all waits for entries and refuse further writes."""
        self.is_deleted = True
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _add_piece(self, shard: int, piece: int, digest: str) -> bool:
        added = self.index.add(IndexEntry(piece=Piece(shard=shard, piece=piece, digest=digest)))
        if added:
            self._locks.pop((shard, piece), None)
            self._wake_waiters()
        return added

    def _is_open(self, index: Index) -> bool:
        """Return whether the copy was neither deleted nor reset since the caller read ``index``."""
        return not self.is_deleted and self.index is index

    def _check_open(self, index: Index | None = None) -> None:
        """Raise StagedError if the copy was deleted, or was reset since the caller read ``index``."""
        if not self._is_open(index or self.index):
            what = "deleted" if self.is_deleted else "started again"
            raise StagedError(f"The copy of update {self.update} has been {what} meanwhile.", StagedFault.DELETED)

    def _check_size(self, more: int) -> None:
        total = self.index.bytes + more
        if total > self.size_limit:
            raise too_large(total, self.size_limit)
        free, needed = shutil.disk_usage(self.folder).free, total - sum(self._touched.values())
        if needed > free:
            message = f"The volume {self.folder.parent} has {free} bytes free, but the rest of the version needs {needed}."
            raise StagedError(message, StagedFault.NO_SPACE)


class Copies:
    """All copies of one volume.

    Args:
        volume: Folder of the copies. It may be readable for others.
        state: Folder of the tickets, which only the owner may read.
    """

    def __init__(self, volume: Path, state: Path) -> None:
        self.volume = volume
        self._tickets_file = state / TICKETS
        self._copies: dict[str, Copy] = {}
        self._saved_tickets: dict[str, str] = {}
        with Writing(volume):
            volume.mkdir(parents=True, exist_ok=True)
            state.mkdir(parents=True, exist_ok=True)
        self._load()

    def get(self, update: str) -> Copy | None:
        """Return the copy of an update."""
        return self._copies.get(update)

    def find(self, digest: str) -> Copy | None:
        """Return the complete copy with a digest."""
        return next((copy for copy in self._copies.values() if copy.index.end is not None and copy.index.end.digest == digest), None)

    def newest_besides(self, update: str) -> Copy | None:
        """Return the newest complete copy of another update."""
        return next((copy for copy in reversed(self._copies.values()) if copy.is_complete and copy.update != update), None)

    def open(self, update: str, ticket: str, size_limit: int) -> Copy:
        """Return the copy of an update, which is created if it is missing. The ticket and the limit of the newest call count."""
        if not re.fullmatch(UPDATE_PATTERN, update):
            raise StagedError(f"{update!r} is not the ID of an update.")
        copy = self._copies.get(update)
        if copy is None:
            copy = Copy(update, self.volume / update, ticket, size_limit)
            with Writing(copy.folder):
                copy.folder.mkdir()
            self._copies[update] = copy
        copy.size_limit = size_limit
        if copy.ticket != ticket or update not in self._saved_tickets:
            copy.ticket = ticket
            self._save_tickets()
        return copy

    async def keep(self, updates: set[str]) -> None:
        """Delete all copies but these. Returns when their space is free.

        If one of these has not begun, the differences of all copies are deleted, because pods copy the new version now.
        """
        if not updates <= self._copies.keys():
            for copy in list(self._copies.values()):
                await copy.differences.clear()
        removed = [self._copies.pop(update) for update in list(self._copies) if update not in updates]
        if not removed:
            return
        for copy in removed:
            copy.mark_deleted()
        hidden = [hide_folder(copy.folder) for copy in removed]
        try:
            self._save_tickets()
        finally:
            await finish_in_thread(lambda: delete_folders(hidden))

    def status(self) -> list[StagedCopy]:
        """Return the status of each copy, oldest first."""
        return [copy.status() for copy in self._copies.values()]

    def _load(self) -> None:
        """Take over complete copies, and delete what an earlier process left unfinished."""
        tickets, boot = self._read_tickets(), read_boot_id()
        found = [path for path in self.volume.iterdir() if path.is_dir() and re.fullmatch(UPDATE_PATTERN, path.name)]
        for folder in sorted(found, key=lambda path: path.stat().st_mtime):
            copy = Copy(folder.name, folder, tickets.get(folder.name, ""), 0)
            try:
                manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
                if manifest.boot != boot:
                    raise StagedError("The machine has started again since it was written.")  # its files may lack their last bytes
                copy.restore(manifest)
            except FileNotFoundError:
                log.info("The copy of update %s is unfinished, so it is deleted.", folder.name)
                hide_folder(folder)
            except (OSError, ValidationError, StagedError) as error:
                log.warning("The copy of update %s cannot be used, so it is deleted: %s", folder.name, str(error).splitlines()[0])
                hide_folder(folder)
            else:
                self._copies[folder.name] = copy
        delete_folders([path for path in self.volume.iterdir() if path.name.startswith(DELETED_PREFIX)])
        self._save_tickets()

    def _read_tickets(self) -> dict[str, str]:
        try:
            found = load_json(self._tickets_file.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read, so copies are not given to other pods until the next update: %s", self._tickets_file, error)
            return {}
        return {str(update): str(ticket) for update, ticket in found.items()} if isinstance(found, dict) else {}

    def _save_tickets(self) -> None:
        self._saved_tickets = {update: copy.ticket for update, copy in self._copies.items()}
        replace_file(self._tickets_file, json.dumps(self._saved_tickets), mode=0o600)
