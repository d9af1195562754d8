"""Where the coordinator's record lives and where its intent comes from: files, or two ConfigMaps.

The record is never healed to empty: when its ConfigMap or file is lost, the newest record is written again. While the
store is away the fleet goes on; the newest record is written when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from sglang_rollout.api.intent import Intent
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import Conflict, KubeError, NotFound
from sglang_rollout.kube.resources import CONFIGMAPS, Object
from sglang_rollout.kube.watch import follow
from sglang_rollout.wire.record import Record

log = logging.getLogger(__name__)

INTENT_KEY = "intent.json"
RECORD_KEY = "weights.json"
WRITE_DEADLINE = 3.0
"""What a commit waits for its record. After it the acknowledgements are the commit, and the record follows."""
POLL_EVERY = 0.5
QUIET = 1.0
"""At most one unhurried write in so many seconds."""
FIRST_DELAY = 0.5
LAST_DELAY = 10.0
CHECK_EVERY = 30.0
"""How often the record is looked for, so that a deleted one is written again although nothing changes."""


class StoreError(Exception):
    """The store cannot be used now. ``str()`` is a sentence."""


class LostError(Exception):
    """Another coordinator has written the record: this one does not lead any more."""


class ChangedError(Exception):
    """Another record is there than the one that was to be replaced."""


class RecordStore(Protocol):
    """Keeps one record."""

    async def read(self) -> Record | None:
        """The record; None when there is none. Raises StoreError."""

    async def write(self, record: Record, *, over: Record | None = None) -> None:
        """Persist the record. Raises StoreError; LostError when a higher term has been written; ChangedError when it was to replace
        ``over`` and another one is there."""


class FileRecord:
    """The record in a file, replaced atomically, in the order in which it was to be written.

    A write that is given up goes on in its thread, for as long as the volume hangs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._order = itertools.count(1)
        self._landed = 0
        """The write whose record is in place."""
        self._landing = threading.Lock()

    async def read(self) -> Record | None:
        """The record; an unreadable file counts as lost, because the agents can prove what it said."""
        try:
            text = await asyncio.to_thread(self._path.read_text)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"the record {self._path} cannot be read: {error}") from error
        return parse_record(text, str(self._path))

    async def write(self, record: Record, *, over: Record | None = None) -> None:
        """Write beside the file and rename. Nobody else writes: who leads holds a lock (``FileLeadership``)."""
        try:
            await asyncio.to_thread(self._replace, record.model_dump_json(indent=1), next(self._order))
        except OSError as error:
            raise StoreError(f"the record {self._path} cannot be written: {error}") from error

    def _replace(self, text: str, order: int) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            # Only here: a volume that hangs while one record is written must not hold up the next one.
            with self._landing:
                if order < self._landed:
                    Path(name).unlink()
                else:
                    Path(name).replace(self._path)
                    self._landed = order
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise


class ConfigMapRecord:
    """The record in ConfigMap ``<name>-weights``: the operator makes it empty and reads it; only we write its data."""

    def __init__(self, kube: Kube, namespace: str, name: str) -> None:
        self._kube = kube
        self._namespace = namespace
        self._name = f"{name}-weights"

    async def read(self) -> Record | None:
        """The record; None when the ConfigMap is absent or still empty."""
        try:
            found = await self._kube.get(CONFIGMAPS, self._namespace, self._name)
        except NotFound:
            return None
        except KubeError as error:
            raise StoreError(str(error)) from error
        return self._parse(found)

    async def write(self, record: Record, *, over: Record | None = None) -> None:
        """Patch the data, but only over what this coordinator, or one before it, has written."""
        try:
            found = await self._kube.get(CONFIGMAPS, self._namespace, self._name)
            there = self._parse(found)
            if there is not None and there.term > record.term:
                raise LostError(f"ConfigMap {self._name} is of term {there.term}, this coordinator is of {record.term}")
            if over is not None and there != over:
                raise ChangedError(f"ConfigMap {self._name} has been written since it was read")
            if there == record:
                return
            patch: Object = {"data": {RECORD_KEY: record.model_dump_json()}}
            version = found["metadata"]["resourceVersion"]
            await self._kube.merge_patch(CONFIGMAPS, self._namespace, self._name, patch, resource_version=version)
        except NotFound as error:
            # The operator makes it again (with the right owner) when it notices; then the record is written into it.
            raise StoreError(f"ConfigMap {self._name} does not exist: waiting for the operator to make it") from error
        except Conflict as error:
            raise StoreError(f"ConfigMap {self._name} changed while it was written; trying again") from error
        except KubeError as error:
            raise StoreError(str(error)) from error

    def _parse(self, found: Object) -> Record | None:
        text = (found.get("data") or {}).get(RECORD_KEY)
        return parse_record(text, f"ConfigMap {self._name}") if text else None


def parse_record(text: str, where: str) -> Record | None:
    """A record from its text; one that cannot be understood counts as lost, and says so in the log."""
    try:
        return Record.model_validate_json(text)
    except ValidationError as error:
        problems = error.errors()[:2]
        log.warning("the record in %s cannot be understood and is rebuilt from the agents: %s", where, problems)
        return None


class Keeper:
    """Writes records: at once for a commit, unhurried otherwise, again and again while the store is away."""

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self._newest: Record | None = None
        self._written: Record | None = None
        self._wake = asyncio.Event()
        self._lock = asyncio.Lock()
        self.problem = ""
        """Why the newest record is not written yet; empty when it is."""

    def save(self, record: Record) -> None:
        """Persist this record when convenient."""
        self._newest = record
        self._wake.set()

    async def write(self, record: Record) -> bool:
        """Persist this record now, waiting shortly. False: it follows later."""
        self._newest = record
        self._wake.set()
        try:
            async with asyncio.timeout(WRITE_DEADLINE):
                await self._flush()
        except (TimeoutError, StoreError) as error:
            self.problem = str(error) or f"the store did not answer within {WRITE_DEADLINE:g} s"
            log.warning("the record of a commit is written later: %s", self.problem)
            return False
        return True

    async def run(self) -> None:
        """Write what is to be written, for ever. Ends only with LostError."""
        delay = FIRST_DELAY
        while True:
            # No wait_for(): before Python 3.12 it forgets a cancellation that comes when what it waits for has just happened.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_EVERY):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._look()
                await self._flush()
                delay = FIRST_DELAY
                self.problem = ""
                await asyncio.sleep(QUIET)
            except StoreError as error:
                if str(error) != self.problem:
                    log.warning("the record is not written: %s", error)
                self.problem = str(error)
                self._wake.set()
                await asyncio.sleep(delay)
                delay = min(delay * 2, LAST_DELAY)

    async def close(self) -> None:
        """Write what is left, if that is possible at once."""
        if self._newest is not None and self._newest != self._written:
            await self.write(self._newest)

    async def _look(self) -> None:
        """A record that somebody deleted is written again."""
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


class IntentSource(Protocol):
    """Says which engines the fleet should have, again after each change."""

    def follow(self) -> AsyncIterator[Intent]:
        """Intents, newest last. Never ends."""


class FileIntent:
    """The intent in a file, read again when it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def follow(self) -> AsyncIterator[Intent]:
        """Yield the intent of the file; one that cannot be read keeps the one before."""
        seen, complaint = "", ""
        while True:
            try:
                text = await asyncio.to_thread(self._path.read_text)
                if text != seen:
                    seen = text
                    yield Intent.model_validate_json(text)
                complaint = ""
            except (OSError, ValidationError) as error:
                if str(error) != complaint:
                    complaint = str(error)
                    log.warning("the intent %s cannot be used: %s", self._path, complaint)
            await asyncio.sleep(POLL_EVERY)


class ConfigMapIntent:
    """The intent in ConfigMap ``<name>-intent``, which the operator writes."""

    def __init__(self, kube: Kube, namespace: str, name: str) -> None:
        self._kube = kube
        self._namespace = namespace
        self._name = f"{name}-intent"

    async def follow(self) -> AsyncIterator[Intent]:
        """Yield the intent of the ConfigMap; while it is absent or cannot be read, the one before stands."""

        def complain(error: KubeError) -> None:
            log.warning("the intent cannot be followed: %s", error)

        async for objects in follow(self._kube, CONFIGMAPS, self._namespace, name=self._name, on_error=complain):
            text = (objects.get(self._name, {}).get("data") or {}).get(INTENT_KEY)
            if not text:
                log.warning("ConfigMap %s has no %s yet", self._name, INTENT_KEY)
                continue
            try:
                yield Intent.model_validate(json.loads(text))
            except ValueError as error:
                log.error("the intent in ConfigMap %s cannot be used: %s", self._name, error)  # noqa: TRY400
