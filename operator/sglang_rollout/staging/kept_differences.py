"""The differences by which the pieces of a version arrived, kept as files for the pods that copy from this one.

They use what is left of the size limit after the version. Without room they are not kept, and other pods copy whole pieces.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from sglang_rollout.staging.files import Writing, finish_in_thread
from sglang_rollout.staging.index import StagedError

log = logging.getLogger(__name__)


class KeptDifferences:
    """The differences of one version from one other version.

    Args:
        folder: Folder of the files. Below the folder of the version, so that both are deleted together.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._base = ""
        self._generation = 0
        """Number of times that all files were deleted."""
        self._sizes: dict[tuple[int, int], int] = {}
        self.bytes = 0
        """Bytes of all files, also of those that are being written."""

    def find(self, base: str, shard: int, piece: int) -> tuple[Path, int] | None:
        """Return file and bytes of the difference of a piece from the version with digest ``base``; None if it is not kept."""
        size = self._sizes.get((shard, piece)) if base and base == self._base else None
        return None if size is None else (self._path(shard, piece), size)

    async def put(self, base: str, shard: int, piece: int, difference: bytes, room: int) -> None:
        """Keep a difference, if all of them stay within ``room`` bytes."""
        key, size = (shard, piece), len(difference)
        self._base = self._base or base
        if base != self._base or key in self._sizes or self.bytes + size > room:
            return
        self.bytes += size
        generation, is_written = self._generation, False
        try:
            await finish_in_thread(lambda: self._write(self._path(shard, piece), difference))
            is_written = True
        except StagedError as error:
            log.info("A difference is not kept, so other pods copy the whole piece: %s", error)
        finally:
            if generation == self._generation:
                self.bytes -= 0 if is_written else size
                self._sizes |= {key: size} if is_written else {}

    async def clear(self) -> None:
        """Delete all files."""
        if self._base:
            self._base, self.bytes, self._generation = "", 0, self._generation + 1
            self._sizes.clear()
            await finish_in_thread(lambda: shutil.rmtree(self._folder, ignore_errors=True))

    def _path(self, shard: int, piece: int) -> Path:
        return self._folder / f"{shard:05d}-{piece}"

    def _write(self, path: Path, difference: bytes) -> None:
        with Writing(path):
            self._folder.mkdir(exist_ok=True)
            path.write_bytes(difference)
