"""`sglang-rollout local` as a process: refusals with a sentence and code 2, children that are restarted, and an end that leaves nothing."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ports import free_port

from sglang_rollout.local import cli
from sglang_rollout.proxy.address import Address

LINE = [sys.executable, "-m", "sglang_rollout.cli", "local"]
pytestmark = pytest.mark.router


def refused(*args: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run([*LINE, *args], capture_output=True, text=True, timeout=30, check=False, env=os.environ | (env or {}))
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    return done.stderr


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def children(pid: int) -> dict[int, str]:
    found = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True, check=False).stdout
    return {int(line.split()[0]): line for line in found.splitlines()}


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and ") Z " not in status.read_text()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A fleet of one engine that is not up: that is no error."""
    url = f"127.0.0.1:{free_port()}"
    line = [*LINE, "--engine", f"127.0.0.1:{free_port()}", "--listen", url, "--state-dir", str(tmp_path / "state"), "--backend", "gloo"]
    with (
        (tmp_path / "out").open("wb") as out,
        subprocess.Popen(line, stdout=out, stderr=out) as process,
    ):
        try:
            until(lambda: "answers at" in (tmp_path / "out").read_text() or process.poll() is not None, 90, "the fleet answers")
            assert process.poll() is None, (tmp_path / "out").read_text()
            yield process, f"http://{url}"
        finally:
            process.kill()


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        text = refused("--engine", "127.0.0.1:1", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert "cannot be used: Address already in use" in text


def test_an_address_that_this_kernel_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without IPv6 refuses the socket itself."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(socket, "socket", refuse)
    assert cli._why_taken(Address.parse("[::1]:30000")) == "Address family not supported by protocol"


def test_engines_that_are_none() -> None:
    assert "is not the URL" in refused("--engine", "https://x:1")
    assert "named twice" in refused("--engine", "127.0.0.1:1", "--engine", "http://127.0.0.1:1", "--listen", f"127.0.0.1:{free_port()}")
    assert "cannot be resolved" in refused("--engine", "nowhere.invalid:1", "--listen", f"127.0.0.1:{free_port()}")
    assert "--engine" in refused()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = refused("--engine", "127.0.0.1:1", "--listen", f"127.0.0.1:{free_port()}", "--state-dir", str(tmp_path / "file"))
    assert "cannot be used" in text


def test_it_runs_without_engines_and_ends_on_sigterm(fleet: tuple[subprocess.Popen[bytes], str], tmp_path: Path) -> None:
    process, url = fleet
    assert answers(f"{url}/fleet/health")
    asked = urllib.request.Request(f"{url}/generate", data=b'{"text": "a"}', headers={"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError, match="503") as failed:
        urllib.request.urlopen(asked, timeout=5)
    assert failed.value.headers["Retry-After"] == "1"
    started = children(process.pid)
    assert len(started) == 5, started
    victim = next(pid for pid, line in started.items() if " agent " in line)
    os.kill(victim, signal.SIGKILL)
    until(lambda: any(" agent " in line for line in children(process.pid).values()), 10, "the agent is started again")
    assert "local-engine-0-agent ended (by SIGKILL); starting it again in 0.5 s" in (tmp_path / "out").read_text()
    ended = children(process.pid)
    folders = [word.rpartition("/")[0] for line in ended.values() for word in line.split() if word.endswith(".cfg")]
    assert folders
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert not [pid for pid in ended if alive(pid)]
    assert not [line for line in folders if Path(line).exists()], "configurations and sockets are gone"
    assert oct((tmp_path / "state" / "token").stat().st_mode)[-3:] == "600"


def test_a_killed_supervisor_takes_its_children_along(fleet: tuple[subprocess.Popen[bytes], str]) -> None:
    process, url = fleet
    started = children(process.pid)
    assert len(started) == 5, started
    process.kill()
    assert process.wait(5) == -signal.SIGKILL
    until(lambda: not [pid for pid in started if alive(pid)], 10, "no child is left")
    assert not answers(f"{url}/fleet/health")
