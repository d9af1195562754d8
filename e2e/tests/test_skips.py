"""`make test` fails if a test is skipped for a reason that is not on the list."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.cluster.paths import REPOSITORY


def run(folder: Path, reason: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with our conftest.py on two tests, of which one is skipped."""
    (folder / "conftest.py").write_text((REPOSITORY / "conftest.py").read_text())
    (folder / "test_x.py").write_text(f"import pytest\ndef test_a():\n    pytest.skip({reason!r})\ndef test_b():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(folder), "-p", "xdist", *options, str(folder)]
    variables = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # xdist is the only plugin that these tests need
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_unlisted_skip_fails_the_run_and_is_named(tmp_path: Path, workers: str) -> None:
    done = run(tmp_path, "the engine environment is not there", "--strict-skips", "-n", workers)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NOT ALLOWED: test_x.py::test_a was skipped" in done.stdout
    assert "the engine environment is not there" in done.stdout


def test_listed_skip_passes(tmp_path: Path) -> None:
    assert run(tmp_path, "this machine has no IPv6: nothing can listen on ::1", "--strict-skips").returncode == 0


def test_any_skip_passes_without_the_option(tmp_path: Path) -> None:
    assert run(tmp_path, "whatever").returncode == 0
