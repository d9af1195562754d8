"""Start and stop scripts of an engine's container, run by a real shell."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sglang_rollout.agent.engine import RunFiles
from sglang_rollout.api.engine_spec import NODE_RANK_ENV
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.start import (
    DRAIN_SCRIPT,
    ENDED_BY_ITSELF,
    FETCH_SCRIPT,
    FOLLOWER_SECONDS,
    GROUP_START_SCRIPT,
    HANDLER,
    START_SCRIPT,
)


def start(folder: Path, *command: str, env: dict[str, str] | None = None) -> int:
    script = (HANDLER + START_SCRIPT).replace(names.RUN_DIR, str(folder))
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", **(env or {})}
    return subprocess.run(["/bin/sh", "-c", script, "engine", *command], env=environment, check=False, timeout=30).returncode


def test_each_start_has_a_new_boot_id_and_removes_old_files(tmp_path: Path) -> None:
    boots = set()
    for _ in range(2):
        (tmp_path / "kill").touch()
        start(tmp_path, "true")
        boots.add((tmp_path / "boot").read_text())
        assert not (tmp_path / "kill").exists()
    assert len(boots) == 2


def test_version_and_settings_of_nccl_are_written(tmp_path: Path) -> None:
    start(tmp_path, "true", env={"NCCL_DEBUG": "INFO", "OTHER": "1"})
    lines = (tmp_path / "nccl").read_text().splitlines()
    assert lines[0].startswith("version=")
    assert lines[1:] == ["NCCL_DEBUG=INFO"]


@pytest.mark.parametrize(("code", "drain", "seen"), [("3", False, 3), ("0", False, ENDED_BY_ITSELF), ("0", True, 0)])
def test_exit_code_shows_if_a_drain_was_requested(tmp_path: Path, code: str, drain: bool, seen: int) -> None:
    touch = f"touch {tmp_path}/drain; " if drain else ""
    assert start(tmp_path, "sh", "-c", f"{touch}exit {code}") == seen


class Member:
    """The start script of a pod, in a session of its own: what it leaves behind is ended too. Without a rank it is the only pod."""

    def __init__(self, folder: Path, rank: int | None, *command: str) -> None:
        self.folder = folder
        script = (HANDLER + (START_SCRIPT if rank is None else GROUP_START_SCRIPT)).replace(names.RUN_DIR, str(folder))
        script = script.replace(f"sleep {FOLLOWER_SECONDS};", "sleep 1;")
        environment = {"PATH": f"{folder}:/usr/local/bin:/usr/bin:/bin", NODE_RANK_ENV: str(rank)}
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", script, "engine", *command], env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 20
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, f"{name} was not written"
            time.sleep(0.02)

    def wait_for_start(self) -> None:
        """Wait until the command has written ``started``. The script sets its handler of SIGTERM right after it has started the command."""
        self.wait_for("started")
        time.sleep(0.5)

    def go(self, boot: str | None = None) -> None:
        self.wait_for("boot")
        (self.folder / "go").write_text(boot or (self.folder / "boot").read_text())

    def end(self) -> int:
        return self.process.wait(25)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Callable[..., Member]]:
    made: list[Member] = []

    def start_member(rank: int | None, *command: str) -> Member:
        made.append(Member(tmp_path, rank, *command))
        return made[-1]

    yield start_member
    for one in made:
        one.close()


def test_member_starts_its_engine_when_its_boot_id_may_start(tmp_path: Path, member: Callable[..., Member]) -> None:
    (tmp_path / "go").write_text("of an earlier boot")
    first = member(1, "sh", "-c", f"touch {tmp_path}/started; exit 3")
    first.go("of another boot\n")
    with pytest.raises(subprocess.TimeoutExpired):
        first.process.wait(1.5)
    assert not (tmp_path / "started").exists()
    first.go()
    assert first.end() == 3
    assert (tmp_path / "started").exists()
    assert not (tmp_path / "boot").exists(), "the other pods hear of the end at once"


def test_waiting_member_ends_with_its_pod(member: Callable[..., Member]) -> None:
    waiting = member(1, "true")
    waiting.wait_for("boot")
    waiting.process.terminate()
    assert waiting.end() == 143


def test_pod_deleted_before_the_start_ends_by_a_handler(tmp_path: Path, member: Callable[..., Member]) -> None:
    """As the container's first process it would not end without one."""
    slow = tmp_path / "python3"
    slow.write_text("#!/bin/sh\ntouch $(dirname $0)/looking\nsleep 1\n")
    slow.chmod(0o755)
    early = member(None, "touch", str(tmp_path / "started"))
    early.wait_for("looking")
    early.process.terminate()
    assert early.end() == 143
    assert not (tmp_path / "started").exists()


def test_drain_during_the_start_is_repeated(tmp_path: Path, member: Callable[..., Member]) -> None:
    """The start script forgets older ones, and the agent takes one that is older than the boot file for an earlier engine's."""
    slow = tmp_path / "python3"
    slow.write_text("#!/bin/sh\ntouch $(dirname $0)/looking\nsleep 1\n")
    slow.chmod(0o755)
    files = RunFiles(tmp_path / "boot")
    starting = member(None, "sleep", "20")
    starting.wait_for("looking")
    hook = subprocess.Popen(["/bin/sh", "-c", DRAIN_SCRIPT.replace(names.RUN_DIR, str(tmp_path))])
    starting.wait_for("boot")
    deadline = time.monotonic() + 20
    while not files.is_drain_requested():
        assert time.monotonic() < deadline, "the request to drain was lost"
        time.sleep(0.1)
    files.drained.touch()
    assert hook.wait(5) == 0


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_kill_file_ends_a_starting_engine_and_is_printed_last(tmp_path: Path, member: Callable[..., Member], rank: int | None) -> None:
    starting = member(rank, "sh", "-c", f"trap '' TERM; touch {tmp_path}/started; while :; do sleep 1; done")
    if rank is not None:
        starting.go()
    starting.wait_for("started")
    (tmp_path / "kill").write_text("rank 3 has ended\n")
    assert starting.end() == 128 + signal.SIGKILL
    assert (tmp_path / "log").read_text().splitlines()[-1] == "rank 3 has ended"


def test_rank_that_ignores_sigterm_is_killed_and_rank_0_is_not(tmp_path: Path, member: Callable[..., Member]) -> None:
    """SGLang's ranks other than 0 leave SIGTERM to rank 0, which may be gone."""
    follower = member(1, "sh", "-c", f"trap '' TERM; touch {tmp_path}/started; while :; do sleep 1; done")
    follower.go()
    follower.wait_for_start()
    follower.process.terminate()
    assert follower.end() == 128 + signal.SIGKILL


def test_rank_0_ends_by_itself(tmp_path: Path, member: Callable[..., Member]) -> None:
    leader = member(0, "sh", "-c", f"trap 'exit 5' TERM; touch {tmp_path}/started; while :; do sleep 0.1; done")
    leader.go()
    leader.wait_for_start()
    leader.process.terminate()
    assert leader.end() == 5


def test_download_receives_sigterm_and_its_exit_code_is_kept(tmp_path: Path) -> None:
    def fetch(script: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["/bin/sh", "-c", FETCH_SCRIPT, "download", "sh", "-c", script])

    assert fetch("exit 3").wait(10) == 3
    running = fetch(f"trap 'touch {tmp_path}/ended; exit 5' TERM; touch {tmp_path}/started; while :; do sleep 0.1; done")
    deadline = time.monotonic() + 20
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline, "it was not started"
        time.sleep(0.02)
    running.terminate()
    assert running.wait(10) == 5
    assert (tmp_path / "ended").exists()
