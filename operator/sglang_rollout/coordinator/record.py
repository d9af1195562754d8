"""The coordinator's record, the right to write it, and how a new leader takes it over.

The record is never replaced by an empty one: if its ConfigMap or file is lost, the newest record is written again. While the store is
away the fleet continues, and the newest record is written when the store is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import logging
import os
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import Conflict, KubeError, NotFound
from sglang_rollout.kube.lease import Lease, LeaseTakenError
from sglang_rollout.kube.resources import CONFIGMAPS, Object
from sglang_rollout.wire.record import Record

log = logging.getLogger(__name__)

RECORD_KEY = "weights.json"
WRITE_DEADLINE_SECONDS = 3.0
"""Longest wait of a commit for its record. After it the engines' acknowledgements are the commit, and the record follows later."""
BACKGROUND_INTERVAL_SECONDS = 1.0
"""Shortest time between two background writes."""
FIRST_RETRY_SECONDS = 0.5
LAST_RETRY_SECONDS = 10.0
CHECK_SECONDS = 30.0
"""Interval of checks that the stored record still exists. They restore a deleted record although nothing changes."""
READ_RETRY_SECONDS = 0.5
TAKEOVER_ATTEMPTS = 3
"""Attempts to write a new term. Each reads the record again, because the previous coordinator may have written meanwhile."""
LOCK_POLL_SECONDS = 0.5
"""Interval of attempts to lock the record's file."""


class DeposedError(Exception):
    """Another coordinator leads: this process must end."""


class Leadership(Protocol):
    """The right to lead."""

    async def acquire(self) -> int:
        """Wait until this process leads. Return a term that is higher than every term announced so far, or 0 if none is stored here."""

    async def announce(self, term: int) -> None:
        """Store the term where the next leader looks, so that its own is higher. Raises DeposedError."""

    async def hold(self) -> None:
        """Keep the right forever. Raises DeposedError when another coordinator has it."""

    async def release(self) -> None:
        """Give the right up, so that the next leader need not wait."""


class FileLeadership:
    """Leadership on one machine: a lock beside the record. The kernel drops the lock when the process ends."""

    def __init__(self, record: Path) -> None:
        self._path = record.with_name(f"{record.name}.lock")
        self._handle: int | None = None

    async def acquire(self) -> int:
        """Wait for the lock and return 0: the record alone stores the term."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        warned = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not warned:
                    log.warning("another coordinator holds %s: waiting until it ends", self._path)
                warned = True
                await asyncio.sleep(LOCK_POLL_SECONDS)
            else:
                self._handle = handle
                return 0

    async def announce(self, term: int) -> None:
        """Do nothing: the record stores the term."""

    async def hold(self) -> None:
        """Wait forever: no process can take a lock that is held."""
        await asyncio.Event().wait()

    async def release(self) -> None:
        """Unlock the file."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class LeaseLeadership:
    """Leadership on a cluster: a Lease whose ``leaseTransitions`` is the term. Agents enforce terms, so a late renewal does no harm."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    async def acquire(self) -> int:
        """Wait for the Lease and return its new ``leaseTransitions``."""
        return await self._lease.acquire()

    async def announce(self, term: int) -> None:
        """Raise ``leaseTransitions`` to the term."""
        with _deposed():
            await self._lease.raise_transitions(term)

    async def hold(self) -> None:
        """Renew the Lease forever."""
        with _deposed():
            await self._lease.keep_renewing()

    async def release(self) -> None:
        """Leave the Lease without a holder."""
        await self._lease.release()


@contextlib.contextmanager
def _deposed() -> Iterator[None]:
    try:
        yield
    except LeaseTakenError as error:
        raise DeposedError(str(error)) from error


log = logging.getLogger(__name__)


class StoreError(Exception):
    """The store cannot be used now; the message says why."""


class HigherTermError(Exception):
    """Another coordinator has written the record under a higher term: this one does not lead any more."""


class RecordChangedError(Exception):
    """The store holds another record than the one that was to be replaced."""


class RecordStore(Protocol):
    """Stores one record."""

    async def read(self) -> Record | None:
        """Return the record; None if there is none. Raises StoreError."""

    async def write(self, record: Record, *, over: Record | None = None) -> None:
        """Store the record.

        Raises:
            StoreError: The store cannot be used now.
            HigherTermError: The stored record has a higher term.
            RecordChangedError: ``over`` is given, and the stored record is another one.
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
        """Return the record. A file with invalid content counts as lost, because the agents can prove what it said."""
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
            # The lock starts here: a volume that hangs while it writes one record must not block the next one.
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
            # The operator recreates it with the right owner; then the record is written into it.
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
        """Why the newest record is not stored yet; empty if it is."""

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
        """Store the newest record if that is possible at once."""
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


async def take_over(store: RecordStore, announce: Callable[[int], Awaitable[None]], acquired: int) -> tuple[int, Record | None]:
    """Write a new term into the record before anything else is done. The previous coordinator stops at it.

    The returned record is the one over which the term was written, so it includes a commit that the previous coordinator wrote after our
    first read. Waits for a store that cannot be read, because nothing is known without it. A store that cannot be written gets the term
    later.

    Args:
        store: Where the record is.
        announce: Stores a term where the next leader looks (``Leadership.announce``).
        acquired: The lowest term to use.

    Returns:
        The term, and the record as it was before the term was written.

    Raises:
        DeposedError: The stored record has a higher term.
    """
    attempts = 0
    while True:
        record = await _read_patiently(store)
        term = max(acquired, (record.term if record else 0) + 1)
        await announce(term)
        if record is None:
            return term, None
        try:
            async with asyncio.timeout(WRITE_DEADLINE_SECONDS):
                await store.write(record.model_copy(update={"term": term}), over=record)
        except RecordChangedError as error:
            log.warning("%s: reading it again", error)
            continue
        except HigherTermError as error:
            raise DeposedError(str(error)) from error
        except (TimeoutError, StoreError) as error:
            attempts += 1
            if attempts < TAKEOVER_ATTEMPTS and await _is_readable(store):
                continue
            log.warning("term %d is written into the record later: %s", term, error or "the store does not answer")
        return term, record


async def _is_readable(store: RecordStore) -> bool:
    await asyncio.sleep(READ_RETRY_SECONDS)
    try:
        async with asyncio.timeout(WRITE_DEADLINE_SECONDS):
            await store.read()
    except (TimeoutError, StoreError):
        return False
    return True


async def _read_patiently(store: RecordStore) -> Record | None:
    last_warning = ""
    while True:
        try:
            return await store.read()
        except StoreError as error:
            if str(error) != last_warning:
                last_warning = str(error)
                log.warning("waiting for the record: %s", last_warning)
            await asyncio.sleep(READ_RETRY_SECONDS)
