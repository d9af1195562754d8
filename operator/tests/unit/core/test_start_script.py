"""The first process of an engine's container, run by a real shell."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sglang_rollout.core import names
from sglang_rollout.core.render.engines import ENDED_BY_ITSELF, START_SCRIPT


def start(folder: Path, *command: str, env: dict[str, str] | None = None) -> int:
    script = START_SCRIPT.replace(names.RUN_DIR, str(folder))
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", **(env or {})}
    return subprocess.run(["/bin/sh", "-c", script, "engine", *command], env=environment, check=False, timeout=30).returncode


def test_each_start_is_another_life_and_forgets_what_was_asked_of_the_one_before(tmp_path: Path) -> None:
    boots = set()
    for _ in range(2):
        (tmp_path / "kill").touch()
        start(tmp_path, "true")
        boots.add((tmp_path / "boot").read_text())
        assert not (tmp_path / "kill").exists()
    assert len(boots) == 2


def test_it_tells_version_and_settings_of_nccl(tmp_path: Path) -> None:
    start(tmp_path, "true", env={"NCCL_DEBUG": "INFO", "OTHER": "1"})
    lines = (tmp_path / "nccl").read_text().splitlines()
    assert lines[0].startswith("version=")
    assert lines[1:] == ["NCCL_DEBUG=INFO"]


@pytest.mark.parametrize(("code", "drain", "seen"), [("3", False, 3), ("0", False, ENDED_BY_ITSELF), ("0", True, 0)])
def test_the_exit_code_says_whether_it_was_asked_to_end(tmp_path: Path, code: str, drain: bool, seen: int) -> None:
    touch = f"touch {tmp_path}/drain; " if drain else ""
    assert start(tmp_path, "sh", "-c", f"{touch}exit {code}") == seen
