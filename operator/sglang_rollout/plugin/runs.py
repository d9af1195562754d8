"""Folders of reports where several engines share one, as beside ``sglang-rollout local``: find an engine's own, and delete old ones."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import time
from pathlib import Path

from .reports import MOST_FILES, RequestsReport, read_reports

log = logging.getLogger(__name__)

_UNFINISHED_SECONDS = 86400.0
"""Age at which the folder of an engine is deleted that has answered no request. Engines load their model before that."""


def find_run(folder: Path, *, port: int, seed: int) -> str | None:
    """Return the newest run of the engine with this port and seed, where no start script gave the run its ID; None if there is none."""
    found: dict[float, str] = {}
    for name, changed in _list_runs(folder).items():
        requests = read_reports(folder, name).requests
        if requests is not None and (requests.port, requests.seed) == (port, seed):
            found[changed] = name
    return found[max(found)] if found else None


def delete_replaced_runs(folder: Path, run: str, own: RequestsReport) -> None:
    """Delete the reports of engines that have ended: those at the port that an engine has now, and old ones without an answered request.

    An error is logged: the reports only take room.

    Args:
        folder: Folder of all runs.
        run: The engine's own run, which is kept.
        own: What the engine reports. Engines of another host may have the same port.
    """
    for name, changed in _list_runs(folder).items():
        if name == run:
            continue
        other = read_reports(folder, name).requests
        is_replaced = other is not None and (other.host, other.port) == (own.host, own.port)
        if is_replaced or (other is None and changed < time.time() - _UNFINISHED_SECONDS):
            try:
                shutil.rmtree(folder / name)
            except OSError as error:
                log.info("The reports of an earlier engine cannot be deleted: %s", error)


def _list_runs(folder: Path) -> dict[str, float]:
    """Return the names of the folders of runs, and when each was last changed; none if the folder cannot be read."""
    try:
        with os.scandir(folder) as entries:
            some = itertools.islice(entries, MOST_FILES)
            return {one.name: one.stat(follow_symlinks=False).st_mtime for one in some if one.is_dir(follow_symlinks=False)}
    except OSError:
        return {}
