"""The tensors that loads have written since the engine's start. They survive a restart of the agent.

A version that lacks one of them would leave the tensor of another version in the engine, and without checksums nothing would show it. Such
tensors are left by a load that failed, and by a version that was loaded and never committed.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from sglang_rollout.agent.record import load, save
from sglang_rollout.staging.copies import Copy
from sglang_rollout.wire import Message

log = logging.getLogger(__name__)

_HASH_BYTES = 8
"""The folder of the agent's records is small: the names of 100,000 tensors would take megabytes."""


class _Record(Message):
    boot_id: str = ""
    """Boot ID of the engine that the names belong to."""
    names: frozenset[str] = frozenset()
    """Hashes of the names."""


class WrittenTensors:
    """Reads and replaces ``written.json`` in the folder of the agent's records. Names are hashes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "written.json"
        self._record: _Record | None = None

    def read(self, boot_id: str) -> frozenset[str]:
        """Return the tensors that loads may have written in this run of the engine."""
        if self._record is None:
            self._record, problem = load(self._path, _Record)
            if problem:
                log.warning("%s; a version without some of the engine's tensors may be loaded.", problem)
        return self._record.names if self._record.boot_id == boot_id else frozenset()

    def replace(self, boot_id: str, names: frozenset[str]) -> None:
        """Remember these tensors for this run of the engine. Raises RecordError."""
        record = _Record(boot_id=boot_id, names=names)
        if record != self._record:
            save(self._path, record)
        self._record = record


def tensors_of(copy: Copy) -> frozenset[str]:
    """Return the tensors of a complete copy."""
    return frozenset(
        hashlib.blake2b(tensor.name.encode(), digest_size=_HASH_BYTES).hexdigest()
        for shard in copy.index.shards
        for tensor in shard.tensors
    )
