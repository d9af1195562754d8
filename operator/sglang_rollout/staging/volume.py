"""Files on a volume that may hang, such as an NFS share: a hung call holds one of a few threads, and nothing else in the process waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from sglang_rollout.staging.files import BATCH_BYTES
from sglang_rollout.staging.index import StagedError, StagedFault

_Result = TypeVar("_Result")
ANSWER_SECONDS = 20.0
"""Time for one call, with the time that it waits for a thread."""
_THREADS = 8


class Volume:
    """Threads for the calls to one volume.

    Args:
        threads: Number of threads; None: those of the event loop, for files in memory.
    """

    def __init__(self, threads: int | None = _THREADS) -> None:
        self._threads = None if threads is None else ThreadPoolExecutor(threads, thread_name_prefix="volume")

    async def run(self, call: Callable[[], _Result], seconds: float | None = ANSWER_SECONDS) -> _Result:
        """Return what a blocking call returns, and raise what it raises.

        Args:
            call: The call.
            seconds: Deadline; None: the caller has one.

        Raises:
            StagedError: The volume has not answered before the deadline.
        """
        try:
            async with asyncio.timeout(seconds) as deadline:
                return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except TimeoutError:
            if not deadline.expired():
                raise  # the call's own
            raise StagedError(f"The volume of the snapshots has not answered for {seconds:g} s.", StagedFault.LATE) from None

    async def read(self, path: Path, offset: int, size: int, seconds: float | None = ANSWER_SECONDS) -> AsyncIterator[bytes]:
        """Yield a part of a file; less if the file ends before.

        ``seconds`` is the deadline of each read. Raises OSError, and StagedError like :meth:`run`.
        """
        while size > 0:
            data = await self.run(partial(_read_part, path, offset, min(size, BATCH_BYTES)), seconds)
            if not data:
                return
            yield data
            offset, size = offset + len(data), size - len(data)


IN_MEMORY = Volume(None)
"""Files that never hang."""


def _read_part(path: Path, offset: int, size: int) -> bytes:
    """Open the file for each part, so that no thread holds a closed file after a cancellation."""
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        return file.read(size) or b""
