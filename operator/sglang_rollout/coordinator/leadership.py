"""The right to lead a fleet. A second coordinator takes over when it gets the right and has written a new term into the record.

Called by :mod:`.driver`. Agents refuse the calls of a coordinator with a lower term.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Protocol

from sglang_rollout.coordinator.record import WRITE_DEADLINE_SECONDS, HigherTermError, RecordChangedError, RecordStore, StoreError
from sglang_rollout.kube.lease import Lease, LeaseTakenError
from sglang_rollout.wire.record import Record

log = logging.getLogger(__name__)

READ_RETRY_SECONDS = 0.5
TAKEOVER_ATTEMPTS = 3
"""Attempts to write a new term. Each attempt reads the record again, because the previous coordinator may have written meanwhile."""
LOCK_POLL_SECONDS = 0.5
"""Interval of attempts to lock the record's file."""


class DeposedError(Exception):
    """Another coordinator leads: this process must end."""


class Leadership(Protocol):
    """The right to lead."""

    async def acquire(self) -> int:
        """Wait until this process leads. Return a term above every announced term, or 0 if only the record stores the term."""

    async def announce(self, term: int) -> None:
        """Store the term where the next leader looks, so that the next leader uses a higher term. Raises DeposedError."""

    async def hold(self) -> None:
        """Keep the right forever. Raises DeposedError when another coordinator has taken it."""

    async def release(self) -> None:
        """Give up the right, so that the next leader need not wait."""


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


async def take_over(store: RecordStore, announce: Callable[[int], Awaitable[None]], acquired: int) -> tuple[int, Record | None]:
    """Write a new term into the record, so that the previous coordinator can write no more commits. Return the term and the record.

    The previous coordinator may commit after our first read. So the term is written only over the record that was read, and the returned
    record includes such a commit. A store that cannot be read is waited for. A store that cannot be written gets the term later.

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
