"""The right to lead the fleet: a Lease on a cluster, a locked file with ``sglang-rollout local``."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from sglang_rollout.kube.lease import Lease, LeaseTakenError

log = logging.getLogger(__name__)

LOCK_POLL_SECONDS = 0.5


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
