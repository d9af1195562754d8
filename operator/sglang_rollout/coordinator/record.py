"""The coordinator's record in its store: a ConfigMap or a file. :mod:`.leadership` decides which coordinator may write it.

An empty record never replaces the record: if its ConfigMap or file is lost, the writer stores the newest record again. While the store
is away the fleet continues, and the writer stores the newest record when the store is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import tempfile
import threading
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import Conflict, KubeError, NotFound
from sglang_rollout.kube.resources import CONFIGMAPS, Object
from sglang_rollout.wire.record import Record

log = logging.getLogger(__name__)

RECORD_KEY = "weights.json"
WRITE_DEADLINE_SECONDS = 3.0
"""Longest wait of a commit for its record. After this time the engines' acknowledgements alone prove the commit, until the record is
written."""
BACKGROUND_INTERVAL_SECONDS = 1.0
"""Shortest time between two background writes."""
FIRST_RETRY_SECONDS = 0.5
LAST_RETRY_SECONDS = 10.0
CHECK_SECONDS = 30.0
"""Interval of checks that the stored record still exists. A check restores a deleted record even if no update has changed it."""


class StoreError(Exception):
    """The store cannot be used now; the message says why."""


class HigherTermError(Exception):
    """Another coordinator has written the record under a higher term, so this coordinator is not the leader."""


class RecordChangedError(Exception):
    """The stored record is not the record that was to be replaced."""


class RecordStore(Protocol):
    """Stores one record."""

    async def read(self) -> Record | None:
        """Return the record; None if there is none. Raises StoreError."""

    async def write(self, record: Record, *, over: Record | None = None) -> None:
        """Store the record.

        Raises:
            StoreError: The store cannot be used now.
            HigherTermError: The stored record has a higher term.
            RecordChangedError: ``over`` is given, and the stored record differs from it.
        """


class FileRecord:
    """The record in a file, which is replaced atomically and in the order of the calls.

    A write that is cancelled continues in its thread for as long as the volume hangs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sequence = itertools.count(1)
        self._landed = 0
        """Sequence number of the write whose record is in place."""
        self._landing = threading.Lock()

    async def read(self) -> Record | None:
        """Return the record. A file with invalid content counts as lost, because the agents can prove its content."""
        try:
            text = await asyncio.to_thread(self._path.read_text)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"the record {self._path} cannot be read: {error}") from error
        return parse_record(text, str(self._path))

    async def write(self, record: Record, *, over: Record | None = None) -> None:
        """Write a temporary file and rename it. No other process writes, because the leader holds a lock (``FileLeadership``)."""
        try:
            await asyncio.to_thread(self._replace, record.model_dump_json(indent=1), next(self._sequence))
        except OSError as error:
            raise StoreError(f"the record {self._path} cannot be written: {error}") from error

    def _replace(self, text: str, sequence: int) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            # The lock starts here: a volume that hangs while it writes one record must not block the next record.
            with self._landing:
                if sequence < self._landed:
                    Path(name).unlink()
                else:
                    Path(name).replace(self._path)
                    self._landed = sequence
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise


class ConfigMapRecord:
    """The record in ConfigMap ``<name>-weights``. The operator creates it empty and reads it; only coordinators write its data."""

    def __init__(self, kube: Kube, namespace: str, name: str) -> None:
        self._kube = kube
        self._namespace = namespace
        self._name = f"{name}-weights"

    async def read(self) -> Record | None:
        """Return the record; None if the ConfigMap is absent or still empty."""
        try:
            found = await self._kube.get(CONFIGMAPS, self._namespace, self._name)
        except NotFound:
            return None
        except KubeError as error:
            raise StoreError(str(error)) from error
        return self._parse(found)

    async def write(self, record: Record, *, over: Record | None = None) -> None:
        """Patch the data. The resource version protects what another coordinator wrote in between."""
        try:
            found = await self._kube.get(CONFIGMAPS, self._namespace, self._name)
            stored = self._parse(found)
            if stored is not None and stored.term > record.term:
                raise HigherTermError(f"ConfigMap {self._name} is of term {stored.term}, this coordinator is of {record.term}")
            if over is not None and stored != over:
                raise RecordChangedError(f"ConfigMap {self._name} has changed since it was read")
            if stored == record:
                return
            patch: Object = {"data": {RECORD_KEY: record.model_dump_json()}}
            version = found["metadata"]["resourceVersion"]
            await self._kube.merge_patch(CONFIGMAPS, self._namespace, self._name, patch, resource_version=version)
        except NotFound as error:
            # The operator recreates the ConfigMap with the right owner. Then the writer stores the record.
            raise StoreError(f"ConfigMap {self._name} does not exist: waiting for the operator to create it") from error
        except Conflict as error:
            raise StoreError(f"ConfigMap {self._name} changed while it was written; trying again") from error
        except KubeError as error:
            raise StoreError(str(error)) from error

    def _parse(self, found: Object) -> Record | None:
        text = (found.get("data") or {}).get(RECORD_KEY)
        return parse_record(text, f"ConfigMap {self._name}") if text else None


def parse_record(text: str, where: str) -> Record | None:
    """Return a record from its text. An invalid text counts as lost, with a warning in the log."""
    try:
        return Record.model_validate_json(text)
    except ValidationError as error:
        problems = error.errors()[:2]
        log.warning("the record in %s is invalid and is rebuilt from the agents: %s", where, problems)
        return None


class RecordWriter:
    """Writes records: at once for a commit, in the background otherwise, with retries while the store is away."""

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self._newest: Record | None = None
        self._written: Record | None = None
        self._wake = asyncio.Event()
        self._lock = asyncio.Lock()
        self.problem = ""
        """Why the newest record is not stored yet; empty if it is stored."""

    def save(self, record: Record) -> None:
        """Store this record in the background."""
        self._newest = record
        self._wake.set()

    async def write(self, record: Record) -> bool:
        """Store this record now. Return False if it takes too long or fails; then the background task stores it later."""
        self._newest = record
        self._wake.set()
        try:
            async with asyncio.timeout(WRITE_DEADLINE_SECONDS):
                await self._flush()
        except (TimeoutError, StoreError) as error:
            self.problem = str(error) or f"the store did not answer within {WRITE_DEADLINE_SECONDS:g} s"
            log.warning("the record of a commit is written later: %s", self.problem)
            return False
        return True

    async def run(self) -> None:
        """Store saved records forever. Raises HigherTermError."""
        delay = FIRST_RETRY_SECONDS
        while True:
            # No wait_for(): before Python 3.12 it loses a cancellation that comes just when its awaitable ends.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._check_exists()
                await self._flush()
                delay = FIRST_RETRY_SECONDS
                self.problem = ""
                await asyncio.sleep(BACKGROUND_INTERVAL_SECONDS)
            except StoreError as error:
                if str(error) != self.problem:
                    log.warning("the record is not written: %s", error)
                self.problem = str(error)
                self._wake.set()
                await asyncio.sleep(delay)
                delay = min(delay * 2, LAST_RETRY_SECONDS)

    async def close(self) -> None:
        """Make one attempt to store the newest record."""
        if self._newest is not None and self._newest != self._written:
            await self.write(self._newest)

    async def _check_exists(self) -> None:
        if self._written is not None and await self._store.read() is None:
            log.warning("the record was deleted; it is written again")
            self._written = None

    async def _flush(self) -> None:
        async with self._lock:
            record = self._newest
            if record is None or record == self._written:
                return
            await self._store.write(record)
            self._written = record
