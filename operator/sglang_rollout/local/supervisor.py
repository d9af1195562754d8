"""Run the processes of a local fleet: restart a process that exits, as a kubelet would, and end all processes together."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from sglang_rollout.child_environment import clean_environment
from sglang_rollout.local.plan import Child

_FIRST_BACKOFF_SECONDS = 0.5
_MAX_BACKOFF_SECONDS = 10.0
_STEADY_SECONDS = 30.0
"""A process that ran this long restarts with the first backoff."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class ChildProcess:
    """One process of the fleet, restarted whenever it exits until the fleet ends."""

    def __init__(self, child: Child, logs: Path, report: Callable[[str], None]) -> None:
        self.child = child
        self.log = logs / f"{child.name}.log"
        self.process: asyncio.subprocess.Process | None = None
        self.starts = 0
        self._report = report
        self._stopping = asyncio.Event()

    async def keep_running(self) -> None:
        """Run the process, and restart it, until :meth:`stop` is called or the task is cancelled."""
        backoff = _FIRST_BACKOFF_SECONDS
        while not self._stopping.is_set():
            began = time.monotonic()
            code = await self._run_once()
            if self._stopping.is_set():
                return
            if time.monotonic() - began > _STEADY_SECONDS:
                backoff = _FIRST_BACKOFF_SECONDS
            self._report(f"{self.child.name} ended ({describe_exit(code)}) and restarts in {backoff:g} s. Its log: {self.log}")
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff):
                    await self._stopping.wait()
            backoff = min(backoff * 2, _MAX_BACKOFF_SECONDS)

    async def stop(self) -> None:
        """End the process: SIGTERM, then SIGKILL after its grace period."""
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

    def describe_log(self, lines: int = 5) -> str:
        """Return where the log is, and its last lines."""
        text = self.log.read_text(errors="replace").strip() if self.log.exists() else ""
        if not text:
            return f"The log of {self.child.name}, {self.log}, is empty: the process has not written anything yet."
        tail = "\n".join(text.splitlines()[-lines:])
        return f"The end of the log of {self.child.name}, {self.log}:\n{tail}"

    async def _run_once(self) -> int:
        supervisor = os.getpid()
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.child.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env={**clean_environment(os.environ), **self.child.environment},
                # Ctrl-C in a terminal goes to the whole process group, but the supervisor ends the children in order.
                process_group=0,
                preexec_fn=lambda: _end_with_parent(supervisor),
            )
        self.starts += 1
        if self._stopping.is_set():  # stop() was called while the process was created
            self._signal(signal.SIGKILL)
        return await self.process.wait()

    def _signal(self, number: int) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


def _end_with_parent(supervisor: int) -> None:
    """Make the kernel kill this child when the supervisor dies. Runs between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)


class Supervisor:
    """All processes of a fleet."""

    def __init__(self, children: Sequence[Child], logs: Path, report: Callable[[str], None]) -> None:
        self.processes = [ChildProcess(child, logs, report) for child in children]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start every process."""
        self._tasks = [asyncio.create_task(process.keep_running(), name=process.child.name) for process in self.processes]

    def find_crash_loop(self) -> ChildProcess | None:
        """Return a process that was started more than twice; None if there is none."""
        return next((process for process in self.processes if process.starts > 2), None)

    async def stop(self) -> None:
        """End the front first, so that no new request arrives, then all other processes at once."""
        for process in self.processes[-1:]:
            await process.stop()
        await asyncio.gather(*(process.stop() for process in self.processes))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def describe_exit(code: int) -> str:
    """Describe how a process ended: by its exit code or by a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"
