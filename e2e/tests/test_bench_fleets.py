"""A benchmark ends when a process that it needs has ended, with what that process said."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench.fleets import LocalFleet, Program, until, until_serving


def test_the_wait_for_a_fleet_that_has_ended_quotes_its_log(tmp_path: Path) -> None:
    log = tmp_path / "local.log"
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", "raise SystemExit('haproxy is missing')"], stdout=output, stderr=output)
    started = time.monotonic()
    with pytest.raises(SystemExit, match=r"(?s)ended with code 1 before this: .*1 engines serve\nhaproxy is missing"):
        until_serving(LocalFleet("http://127.0.0.1:9", ["http://127.0.0.1:9"], [Program(process, log)]), 30)
    assert time.monotonic() - started < 10


def test_a_condition_is_waited_for_while_the_process_runs() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        turns = iter([False, False, True])
        until("the third turn", lambda: next(turns), 20, programs=[Program(process)])
        assert not list(turns), "it has asked three times"
    finally:
        process.kill()
        process.wait()
