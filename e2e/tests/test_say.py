"""Long steps of demo and lab show that they live."""

from __future__ import annotations

import time

import pytest

from e2e.cluster.say import LabError, say, step


def test_a_step_without_output_says_that_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with step("build a cathedral", quiet_seconds=0.2):
        time.sleep(0.7)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].endswith(" s  build a cathedral")
    assert lines[:-1]
    assert all(line.endswith(" s  … build a cathedral") for line in lines[:-1])


def test_a_step_with_output_of_its_own_is_not_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    with step("train", quiet_seconds=5.0):
        say("one")
    assert "…" not in capsys.readouterr().err


def test_a_step_that_failed_is_silent_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LabError), step("fail", quiet_seconds=0.1):
        raise LabError("no")
    capsys.readouterr()
    time.sleep(0.3)
    assert capsys.readouterr().err == ""
