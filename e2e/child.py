"""Start processes that end with the process that started them, even if that process is killed. Linux only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_WRAPPER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)              # PR_SET_PDEATHSIG, SIGKILL; survives exec
if os.getppid() != int(sys.argv[1]):       # the parent died before the call above
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""
_starter = ThreadPoolExecutor(1, "start-child")
"""The kernel sends the signal when the *thread* that forked ends. This thread lives as long as the process."""


def killed_with_parent(command: Sequence[str]) -> list[str]:
    """Return a command line that runs `command` and that the kernel kills when the thread that starts it ends.

    For `asyncio.create_subprocess_exec`, which starts processes from the thread of its event loop.
    """
    return [sys.executable, "-I", "-S", "-c", _WRAPPER, str(os.getpid()), *command]


def start_child(command: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
    """Start a process that the kernel kills with SIGKILL when this process ends for any reason.

    The process itself has the returned PID: the wrapper that asks for the signal replaces itself with `command`.
    A program that is missing ends with code 1 and a traceback on its stderr, instead of raising here.

    Args:
        command: Program and arguments.
        **popen: Options of `subprocess.Popen`.
    """

    def start() -> subprocess.Popen[Any]:
        return subprocess.Popen(killed_with_parent(command), **popen)

    return _starter.submit(start).result()
