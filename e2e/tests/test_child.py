"""Child processes end when the process that started them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from e2e.child import start_child
from e2e.cluster.paths import REPOSITORY

PARENT = """
import pathlib, sys, threading, time
from e2e.engine import Engine
engine = Engine(1, ["sleep", "300"], pathlib.Path(sys.argv[1]), {})
starter = threading.Thread(target=engine.start)
starter.start()
starter.join()                             # the child outlives the thread that asked for it
print(engine.process.pid, flush=True)
time.sleep(300)
"""


def is_running(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_engine_ends_with_the_process_that_started_it(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "log")]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "operator")])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.5)
        assert is_running(child)
        parent.send_signal(number)
    end = time.monotonic() + 20
    while is_running(child):
        assert time.monotonic() < end, "the child still runs"
        time.sleep(0.02)


def test_child_outlives_the_thread_that_started_it_and_has_the_returned_pid() -> None:
    started: list[subprocess.Popen[bytes]] = []
    thread = threading.Thread(target=lambda: started.append(start_child(["sleep", "300"])))
    thread.start()
    thread.join()
    try:
        end = time.monotonic() + 20
        while Path(f"/proc/{started[0].pid}/cmdline").read_bytes() != b"sleep\x00300\x00":
            assert time.monotonic() < end, "the wrapper was not replaced"
            time.sleep(0.02)
        time.sleep(0.2)
        assert started[0].poll() is None
    finally:
        started[0].kill()
        started[0].wait()
