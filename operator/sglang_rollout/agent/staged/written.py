"""The tensors that loads have written since the engine's start. They survive a restart of the agent.

A version that lacks one of them would leave the tensor of another version in the engine, and without checksums nothing would show it. Such
tensors are left by a load that failed, and by a version that was loaded and never committed.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path

from sglang_rollout.agent.record import RecordError, load, save
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
    attempt: str = ""
    """The last load that wrote new tensors."""
    added: frozenset[str] = frozenset()
    """The names that it added."""


class WrittenTensors:
    """Reads and replaces ``written.json`` in the folder of the agent's records. Names are hashes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "written.json"
        self._record, problem = load(self._path, _Record)
        self._is_readable = not problem
        if problem:
            log.warning("%s; an engine to which weights were written loads no version before its next start.", problem)

    def read(self, boot_id: str) -> frozenset[str] | None:
        """Return the tensors that loads may have written in this run of the engine; None if the file cannot be read."""
        if self._record.boot_id == boot_id:
            return self._record.names
        return frozenset() if self._is_readable else None

    def begin(self, boot_id: str, attempt: str, names: frozenset[str]) -> None:
        """Remember that a load may write these tensors. The version has all that were written before. Raises RecordError."""
        before = self.read(boot_id) or frozenset()
        if names == before:
            return
        record = _Record(boot_id=boot_id, names=names | before, attempt=attempt, added=names - before)
        save(self._path, record)
        self._record = record

    def undo(self, attempt: str) -> None:
        """Forget the tensors that a load would have added: it has written none."""
        if self._record.attempt != attempt:
            return
        record = self._record.model_copy(update={"names": self._record.names - self._record.added, "attempt": "", "added": frozenset()})
        try:
            save(self._path, record)
        except RecordError as error:
            log.warning(
                "%s Until it restarts, the engine loads only versions that have all tensors of the version that it has just refused.", error
            )
            return
        self._record = record


def hash_names(names: Iterable[str]) -> frozenset[str]:
    """Return the hashes of names."""
    return frozenset(hashlib.blake2b(name.encode(), digest_size=_HASH_BYTES).hexdigest() for name in names)


def find_left(written: frozenset[str], tensors: frozenset[str], model: frozenset[str] | None) -> frozenset[str]:
    """Return the tensors of earlier loads that a version would leave in an engine. All sets are hashes of names.

    Args:
        written: The tensors that loads may have written since the engine's start.
        tensors: The tensors of the version.
        model: The tensors of the engine's model, which ignores others; None: not known.
    """
    left = written - tensors
    return left if model is None else left & model


def tensors_of(copy: Copy) -> frozenset[str]:
    """Return the tensors of a complete copy."""
    return hash_names(tensor.name for shard in copy.index.shards for tensor in shard.tensors)
