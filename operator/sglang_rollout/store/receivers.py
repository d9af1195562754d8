"""Child processes that receive from the trainers' process groups: started, commanded, and killed at a deadline."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sglang_rollout.child_environment import clean_environment
from sglang_rollout.json_text import load_json
from sglang_rollout.wire.reasons import RefusalCode, end_sentence
from sglang_rollout.wire.staged import StoreGroupRequest

log = logging.getLogger(__name__)

START_SECONDS = 120.0
"""Deadline for a child to import torch."""
_MARGIN_SECONDS = 1.0
"""How much later than the child itself the store ends a call: the child's error is clearer."""
_MODULE = "sglang_rollout.store.receiver"
NO_TORCH = (
    f"The Python of the weight store, {sys.executable}, has no torch, which a process group needs: upload over HTTP,"
    " or start the weight store with a Python that has torch (sglang-rollout local --store-python)."
)

Progress = Callable[[int], None]
"""Receives the number of bytes at the beginning of a shard that have arrived."""


class ReceiverError(Exception):
    """A process group could not be joined, or a broadcast did not arrive. The message is a sentence. The child has ended."""

    def __init__(self, message: str, code: RefusalCode = RefusalCode.UPSTREAM_FAILED) -> None:
        super().__init__(message)
        self.code = code


class Receiver:
    """One child process, for one process group."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._busy = asyncio.Lock()

    @classmethod
    async def start(cls) -> Receiver:
        """Start a child, and wait until it has imported torch.

        Raises:
            ReceiverError: The child does not start, or this Python has no torch.
        """
        if importlib.util.find_spec("torch") is None:
            raise ReceiverError(NO_TORCH, RefusalCode.BACKEND_UNAVAILABLE)
        pipe = asyncio.subprocess.PIPE
        line = [sys.executable, "-m", _MODULE, str(os.getpid())]
        process = await asyncio.create_subprocess_exec(*line, stdin=pipe, stdout=pipe, env=clean_environment(os.environ))
        receiver = cls(process)
        await receiver._finish("start", START_SECONDS, "ready")
        return receiver

    @property
    def is_alive(self) -> bool:
        """True while the child runs."""
        return self._process.returncode is None

    @property
    def is_busy(self) -> bool:
        """True while a command runs."""
        return self._busy.locked()

    async def join(self, request: StoreGroupRequest) -> None:
        """Join a process group.

        Raises:
            ReceiverError: The child could not join before the deadline.
        """
        command = {
            "host": request.master_address.removeprefix("[").removesuffix("]"),
            "port": request.master_port,
            "group": request.group_name,
            "rank": request.rank_offset,
            "world_size": request.world_size,
            "backend": request.backend,
        }
        await self._command("join", command, request.deadline)

    async def receive(self, path: Path, data_start: int, sizes: Sequence[int], deadline: float, progress: Progress) -> None:
        """Receive one broadcast per size into a file.

        Args:
            path: File of the shard.
            data_start: Offset of the first byte in the file.
            sizes: Bytes of each broadcast.
            deadline: Seconds for all broadcasts.
            progress: Called while broadcasts arrive.

        Raises:
            ReceiverError: Not all bytes arrived before the deadline.
        """
        await self._command("receive", {"path": str(path), "data_start": data_start, "sizes": list(sizes)}, deadline, progress)

    async def kill(self) -> None:
        """End the child, whatever it does."""
        with suppress(ProcessLookupError):  # it ended first
            self._process.kill()
        await self._process.wait()

    async def _command(self, action: str, fields: dict[str, Any], deadline: float, progress: Progress = lambda _: None) -> None:
        async with self._busy:
            line = json.dumps({"do": action, **fields, "deadline": deadline}) + "\n"
            if self._process.stdin is None:
                raise RuntimeError("the child was started without a pipe")
            try:
                self._process.stdin.write(line.encode())
                await self._process.stdin.drain()
            except OSError as error:
                await self.kill()
                raise ReceiverError(self._describe_end(action)) from error
            await self._finish(action, deadline + _MARGIN_SECONDS, "done", progress)

    async def _finish(self, action: str, seconds: float, last: str, progress: Progress = lambda _: None) -> None:
        """Read answers until the last one. The child ends if another caller cancels the command, because an answer would be left over."""
        try:
            async with asyncio.timeout(seconds):
                await self._read_answers(action, last, progress)
        except TimeoutError:
            await self.kill()
            raise ReceiverError(f"The receiver did not {action} within {seconds - _MARGIN_SECONDS:g} s, and was killed.") from None
        except BaseException:
            await self.kill()
            raise

    async def _read_answers(self, action: str, last: str, progress: Progress) -> None:
        if self._process.stdout is None:
            raise RuntimeError("the child was started without a pipe")
        while line := await self._process.stdout.readline():
            answer = load_json(line)
            if last in answer:
                return
            if "code" in answer:
                raise ReceiverError(end_sentence(answer["error"]), RefusalCode(answer["code"]))
            if "error" in answer:
                raise ReceiverError(end_sentence(f"The receiver could not {action}: {answer['error']}"))
            progress(int(answer["received"]))
        await self._process.wait()
        raise ReceiverError(self._describe_end(action))

    def _describe_end(self, action: str) -> str:
        code = self._process.returncode or 0
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        full = " Is the volume full?" if code == -signal.SIGBUS else ""  # a page of the mapped file could not be allocated
        log = " The log of the weight store has the reason." if code > 0 else ""
        return f"The receiver ended with {cause} when it should {action}.{full}{log}"


class Receivers:
    """The open process groups, and one spare child, because the import of torch takes seconds that the trainer need not wait."""

    def __init__(self) -> None:
        self._groups: dict[str, Receiver] = {}
        self._beginning: dict[str, object] = {}
        """The newest call to join each process group that has no child yet."""
        self._spare: asyncio.Task[Receiver] | None = None

    @property
    def names(self) -> list[str]:
        """Names of the open process groups."""
        return [name for name, receiver in self._groups.items() if receiver.is_alive]

    def prepare(self) -> None:
        """Start the spare child. One that could not start is replaced: the cause may have passed."""
        has_failed = self._spare is not None and self._spare.done() and (self._spare.cancelled() or self._spare.exception() is not None)
        if self._spare is None or has_failed:
            self._spare = asyncio.create_task(Receiver.start(), name="start a receiver")

    def find(self, name: str) -> Receiver | None:
        """Return the receiver of an open process group; None if there is none."""
        receiver = self._groups.get(name)
        return receiver if receiver is not None and receiver.is_alive else None

    async def join(self, request: StoreGroupRequest) -> None:
        """Join a process group. An open one with the same name is left first: its trainer has started again.

        Raises:
            ReceiverError: The process group could not be joined before the deadline.
        """
        name, call = request.group_name, object()
        await self.leave(name)
        self._beginning[name] = call
        receiver = await self._take_spare()
        if self._beginning.get(name) is not call:
            await receiver.kill()
            raise ReceiverError("another call has joined or left it meanwhile.")
        del self._beginning[name]
        self._groups[name] = receiver  # so that a call to leave ends the attempt
        try:
            await receiver.join(request)
        finally:
            if not receiver.is_alive and self._groups.get(name) is receiver:
                del self._groups[name]

    async def leave(self, name: str) -> None:
        """Leave a process group, if it is open. This ends a call that waits in it, or that begins to join it."""
        self._beginning.pop(name, None)
        receiver = self._groups.pop(name, None)
        if receiver is not None:
            await receiver.kill()

    async def close(self) -> None:
        """Leave all process groups, and end the spare child."""
        for name in list(self._groups):
            await self.leave(name)
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.cancel()
            for made in await asyncio.gather(spare, return_exceptions=True):
                if isinstance(made, Receiver):
                    await made.kill()

    async def _take_spare(self) -> Receiver:
        """Return a child that is ready, and start the next spare one."""
        self.prepare()
        spare, self._spare = self._spare, None
        if spare is None:
            raise RuntimeError("no receiver was started")
        try:
            receiver = await spare
        except BaseException:
            spare.cancel()
            raise
        self.prepare()
        if receiver.is_alive:
            return receiver
        log.warning("A spare receiver ended before it was used; starting another one.")
        return await Receiver.start()
