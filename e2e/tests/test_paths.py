"""Content keys depend on file contents, names and modes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from e2e.cluster.paths import cache_root, content_key, files_below, lab_root


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b/two.py", "a.txt", "b/__pycache__/two.cpython-311.pyc", "b/old.pyc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def test_files_are_sorted_and_without_compiled_files(tree: Path) -> None:
    assert files_below(tree) == [tree / "a.txt", tree / "b/two.py"]
    assert files_below(tree / "b", tree / "a.txt") == [tree / "b/two.py", tree / "a.txt"]
    assert files_below(tree / "absent") == []


def test_key_depends_on_content_name_mode_and_words(tree: Path) -> None:
    file = tree / "a.txt"
    key = content_key([file], "word")
    os.utime(file, (0, 0))
    assert content_key([file], "word") == key, "a new checkout has other modification times"
    assert len({key, content_key([file]), content_key([file], "other"), content_key([file, file], "word")}) == 4
    file.chmod(0o755)
    executable = content_key([file], "word")
    file.write_text("a.txT")
    assert len({key, executable, content_key([file], "word")}) == 3
    other = file.rename(tree / "c.txt")
    other.write_text("a.txt")
    assert content_key([other], "word") != executable


def test_key_separates_words() -> None:
    assert content_key([], "ab", "c") != content_key([], "a", "bc")


def test_environment_variables_set_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SGLANG_ROLLOUT_CACHE", str(tmp_path / "mine"))
    assert cache_root() == tmp_path / "mine"
    assert lab_root() == tmp_path / "mine" / "lab"
    monkeypatch.delenv("SGLANG_ROLLOUT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "sglang-rollout"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "sglang-rollout"
