"""The folder that the agent shares with the engine's container, in which model code may write anything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_rollout.agent.engine import RunFiles, StartBarrier, read_text, replace_file
from sglang_rollout.wire.agent import Verdict


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("s3cret")
    return file


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def test_a_link_to_a_secret_is_no_boot_id(run: Path, secret: Path) -> None:
    (run / "boot").symlink_to(secret)
    assert RunFiles(run / "boot").boot_id() is None


def test_a_pipe_does_not_block(run: Path) -> None:
    os.mkfifo(run / "boot")
    assert read_text(run / "boot") is None


def test_a_large_file_is_read_in_part(run: Path) -> None:
    (run / "boot").write_text("x" * 2**20)
    assert len(read_text(run / "boot") or "") == 2**16


@pytest.mark.parametrize("name", ["go", "kill", "drained"])
def test_a_write_replaces_a_link_and_leaves_its_target(run: Path, secret: Path, name: str) -> None:
    (run / name).symlink_to(secret)
    replace_file(run / name, "text")
    assert secret.read_text() == "s3cret"
    assert (run / name).read_text() == "text"
    assert {file.name for file in run.iterdir()} == {name}, "no file is left over"


def test_the_start_file_does_not_follow_a_link_of_a_temporary_name(run: Path, secret: Path) -> None:
    for name in ("go", "go.new"):
        (run / name).symlink_to(secret)
    StartBarrier(RunFiles(run / "boot")).carry_out(Verdict.GO, "b1", "")
    assert secret.read_text() == "s3cret"
    assert (run / "go").read_text() == "b1"
