"""Folders of reports of several engines: each finds its own, and old ones are deleted."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.plugin.reports import REQUESTS_FILE, RequestsReport, scheduler_file, write_report
from sglang_rollout.plugin.runs import delete_replaced_runs, find_run

OWN: dict[str, Any] = {"release": "0.5.23", "pid": 12, "port": 30001, "seed": 123, "host": "a"}
DAYS_AGO = time.time() - 2 * 86400


def write(folder: Path, run: str, *, changed: float | None = None, requests: bool = True, **fields: Any) -> None:
    write_report(str(folder / run), REQUESTS_FILE if requests else scheduler_file("0-0-0"), OWN | fields)
    if changed is not None:
        os.utime(folder / run, (changed, changed))


def delete(folder: Path) -> set[str]:
    """Delete what the engine of ``own`` replaces. Return the names that are left."""
    write(folder, "own")
    delete_replaced_runs(folder, "own", RequestsReport(**OWN))
    return {path.name for path in folder.iterdir()}


def test_an_engine_deletes_the_reports_of_earlier_engines_at_its_port(tmp_path: Path) -> None:
    for run in ("earlier", "older"):
        write(tmp_path, run, seed=5)
    write(tmp_path, "at-another-port", port=30002, changed=DAYS_AGO)
    write(tmp_path, "on-another-host", host="b", changed=DAYS_AGO)
    assert delete(tmp_path) == {"own", "at-another-port", "on-another-host"}


def test_reports_of_an_engine_that_never_answered_are_kept_for_a_day(tmp_path: Path) -> None:
    write(tmp_path, "loads-its-model", requests=False)
    write(tmp_path, "ended-while-it-loaded", requests=False, changed=DAYS_AGO)
    assert delete(tmp_path) == {"own", "loads-its-model"}


def test_links_and_files_are_left_alone(tmp_path: Path) -> None:
    folder, other = tmp_path / "reports", tmp_path / "other"
    write(other, "run")
    folder.mkdir()
    (folder / "link").symlink_to(other / "run")
    (folder / "file").write_text("{}")
    os.utime(folder / "link", (DAYS_AGO, DAYS_AGO), follow_symlinks=False)
    assert delete(folder) == {"own", "link", "file"}
    assert (other / "run" / REQUESTS_FILE).exists()


def test_a_folder_that_cannot_be_deleted_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("shutil.rmtree", refuse)
    write(tmp_path, "earlier")
    assert delete(tmp_path) == {"own", "earlier"}


def test_the_newest_run_of_an_engine_is_found(tmp_path: Path) -> None:
    write(tmp_path, "old", changed=DAYS_AGO)
    write(tmp_path, "new")
    write(tmp_path, "other", seed=5)
    assert find_run(tmp_path, port=30001, seed=123) == "new"
    assert find_run(tmp_path, port=30002, seed=123) is None
    assert find_run(tmp_path / "absent", port=30001, seed=123) is None
