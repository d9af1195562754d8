"""A Python that cannot run the weight store is refused before any process starts, with what it lacks and the name of the option."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sglang_rollout.local.store_python import StorePythonError, check_store_python


def script(folder: Path, *lines: str) -> Path:
    made = folder / "python"
    made.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    made.chmod(0o755)
    return made


def refusal(python: Path) -> str:
    with pytest.raises(StorePythonError) as refused:
        check_store_python(python)
    assert str(refused.value).startswith(f"--store-python {python} ")
    return str(refused.value)


def test_a_python_without_torch_is_refused() -> None:
    said = refusal(Path(sys.executable))
    assert "has no torch" in said
    assert "leave --store-python out if trainers upload over HTTP" in said


def test_a_python_without_a_library_of_the_coordinator_is_refused(tmp_path: Path) -> None:
    said = refusal(script(tmp_path, f'exec {sys.executable} -S "$@"'))
    assert "cannot import pydantic" in said or "cannot import click" in said or "cannot import aiohttp" in said
    assert "install sglang-rollout[coordinator] for this Python" in said


def test_an_old_python_is_refused(tmp_path: Path) -> None:
    old = script(tmp_path, """echo '{"version": [3, 9], "missing": "", "torch": true}'""")
    assert "is Python 3.9, and the weight store needs 3.11 or newer" in refusal(old)


def test_what_is_no_python_is_refused(tmp_path: Path) -> None:
    assert "the weight store: no such luck" in refusal(script(tmp_path, "echo no such luck >&2", "exit 3"))
    assert "exit code 3" in refusal(script(tmp_path, "exit 3"))
    (tmp_path / "text").write_text("text")
    assert "cannot be run: Permission denied" in refusal(tmp_path / "text")


def test_a_python_with_torch_and_the_libraries_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('the check imports torch, which takes seconds')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check_store_python(Path(sys.executable))
