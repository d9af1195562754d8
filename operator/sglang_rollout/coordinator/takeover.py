"""The first thing a coordinator does: take the record over, so that nothing that the one before wrote is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from sglang_rollout.coordinator.leader import DeposedError
from sglang_rollout.coordinator.record_store import WRITE_DEADLINE, ChangedError, LostError, RecordStore, StoreError
from sglang_rollout.wire.record import Record

log = logging.getLogger(__name__)

READ_AGAIN = 0.5
TRIES = 3
"""A term that could not be written at first is no fence: the record is read again, for what the one before has written meanwhile."""


async def claim(store: RecordStore, announce: Callable[[int], Awaitable[None]], held: int) -> tuple[int, Record | None]:
    """Make a new term known, ``held`` or higher, before anything else is done: the coordinator before this one stops at it.

    ``announce`` writes a term where the next leader looks (``Leadership.claim``). Returns the term, and the record as it was when the term
    was written over it. A commit that the one before wrote after we had read is therefore in what is returned. Waits for a store that
    cannot be read, because nothing is known without it; one that cannot be written gets the term later. Raises DeposedError.
    """
    tries = 0
    while True:
        record = await _read(store)
        term = max(held, (record.term if record else 0) + 1)
        await announce(term)
        if record is None:
            return term, None
        try:
            async with asyncio.timeout(WRITE_DEADLINE):
                await store.write(record.model_copy(update={"term": term}), over=record)
        except ChangedError as error:
            log.warning("%s: reading it again", error)
            continue
        except LostError as error:
            raise DeposedError(str(error)) from error
        except (TimeoutError, StoreError) as error:
            tries += 1
            if tries < TRIES and await _readable(store):
                continue
            log.warning("term %d is written into the record later: %s", term, error or "the store does not answer")
        return term, record


async def _readable(store: RecordStore) -> bool:
    await asyncio.sleep(READ_AGAIN)
    try:
        async with asyncio.timeout(WRITE_DEADLINE):
            await store.read()
    except (TimeoutError, StoreError):
        return False
    return True


async def _read(store: RecordStore) -> Record | None:
    complaint = ""
    while True:
        try:
            return await store.read()
        except StoreError as error:
            if str(error) != complaint:
                complaint = str(error)
                log.warning("waiting for the record: %s", complaint)
            await asyncio.sleep(READ_AGAIN)
