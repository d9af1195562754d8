"""Files on a volume that may hang, such as an NFS share: a hung call holds one of a few threads, and nothing else in the process waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from sglang_rollout.staging.files import BATCH_BYTES
from sglang_rollout.staging.index import StagedError, StagedFault

_Result = TypeVar("_Result")
ANSWER_SECONDS = 20.0
"""Time for a call while a caller waits for the answer, with the time that the call waits for a thread."""
LOAD_SECONDS = 60.0
"""The same in a load in the background."""
_THREADS = 8


class Volume:
    """Threads for the calls to one volume. They do not keep the process from ending, as those of a ThreadPoolExecutor would."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        for number in range(_THREADS):
            threading.Thread(target=self._work, name=f"volume-{number}", daemon=True).start()

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
                return await asyncio.wrap_future(self.start(call))
        except TimeoutError:
            if not deadline.expired():
                raise  # the call's own
            raise StagedError(f"The volume of the snapshots has not answered for {seconds:g} s.", StagedFault.LATE) from None

    def start(self, call: Callable[[], _Result]) -> Future[_Result]:
        """Start a blocking call, and return its result to come."""
        future: Future[_Result] = Future()
        self._calls.put((future, call))
        return future

    async def read(self, path: Path, offset: int, size: int, seconds: float = ANSWER_SECONDS) -> AsyncIterator[bytes]:
        """Yield a part of a file; less if the file ends before.

        ``seconds`` is the deadline of each read. Raises OSError, and StagedError like :meth:`run`.
        """
        while size > 0:
            data = await self.run(partial(_read_part, path, offset, min(size, BATCH_BYTES)), seconds)
            if not data:
                return
            yield data
            offset, size = offset + len(data), size - len(data)

    def _work(self) -> None:
        while True:
            future, call = self._calls.get()
            if not future.set_running_or_notify_cancel():
                continue  # nothing waits for it any longer
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - the caller of run() raises it
                future.set_exception(error)
            else:
                future.set_result(result)


def _read_part(path: Path, offset: int, size: int) -> bytes:
    """Open the file for each part, so that no thread holds a closed file after a cancellation."""
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        return file.read(size) or b""
