"""Keeps the children of a local fleet running, as a kubelet would, and ends them all."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from sglang_rollout.local.plan import Child

_FIRST_BACKOFF = 0.5
_LONGEST_BACKOFF = 10.0
_STEADY_AFTER = 30.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class Keeper:
    """One child: started, started again when it ends, ended when the fleet ends."""

    def __init__(self, child: Child, logs: Path, say: Callable[[str], None]) -> None:
        self.child = child
        self.log = logs / f"{child.name}.log"
        self.process: asyncio.subprocess.Process | None = None
        self.starts = 0
        self._say = say
        self._stopping = asyncio.Event()

    async def keep(self) -> None:
        """Run until :meth:`stop` is called or the task is cancelled."""
        backoff = _FIRST_BACKOFF
        while not self._stopping.is_set():
            began = time.monotonic()
            code = await self._run()
            if self._stopping.is_set():
                return
            if time.monotonic() - began > _STEADY_AFTER:
                backoff = _FIRST_BACKOFF
            self._say(f"{self.child.name} ended ({ending(code)}); starting it again in {backoff:g} s. Its log: {self.log}")
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff):
                    await self._stopping.wait()
            backoff = min(backoff * 2, _LONGEST_BACKOFF)

    async def stop(self) -> None:
        """End the child: politely, and after its grace at once."""
        self._stopping.set()
        if self.process is None or self.process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self.child.grace):
                await self.process.wait()
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self.process.wait()

    def tail(self, lines: int = 5) -> str:
        """The end of the log."""
        with suppress(FileNotFoundError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""

    async def _run(self) -> int:
        supervisor = os.getpid()
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.child.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                # Ctrl-C in a terminal goes to the whole group; ending the children in order is the supervisor's task.
                process_group=0,
                preexec_fn=lambda: _die_with(supervisor),
            )
        self.starts += 1
        if self._stopping.is_set():  # asked to stop while the child was being made
            self._signal(signal.SIGKILL)
        return await self.process.wait()

    def _signal(self, number: int) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


def _die_with(supervisor: int) -> None:
    """Between fork and exec: have the kernel end this child when the supervisor is killed, so that nothing is left behind."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)


class Supervisor:
    """All children of a fleet."""

    def __init__(self, children: Sequence[Child], logs: Path, say: Callable[[str], None]) -> None:
        self.keepers = [Keeper(child, logs, say) for child in children]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start every child."""
        self._tasks = [asyncio.create_task(keeper.keep(), name=keeper.child.name) for keeper in self.keepers]

    def failed(self) -> Keeper | None:
        """A child that has ended again and again since the start."""
        return next((keeper for keeper in self.keepers if keeper.starts > 2), None)

    async def stop(self) -> None:
        """End the children: the front first, so that nobody comes in any more, then all others at once."""
        for keeper in self.keepers[-1:]:
            await keeper.stop()
        await asyncio.gather(*(keeper.stop() for keeper in self.keepers))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def ending(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"
