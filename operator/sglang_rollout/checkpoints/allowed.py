"""Folders below which trainers may name checkpoints and adapters (``security.paths``)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Return True if an absolute path is one of the folders, or lies below one. Compares texts only."""
    parts = os.path.normpath(path).split("/")
    return os.path.isabs(path) and any(parts[: len(wanted)] == wanted for wanted in (folder.split("/") for folder in folders))


def is_allowed(path: str, folders: Sequence[str]) -> bool:
    """Return True if a path is a readable folder below one of the folders, and no symbolic link in it leads out of them. Blocks."""
    if not is_below(path, folders):  # nothing outside is touched
        return False
    roots = [os.path.realpath(folder) for folder in folders]
    try:
        found = os.path.realpath(path, strict=True)
        with os.scandir(found) as entries:
            targets = [os.path.realpath(entry.path) for entry in entries]
    except OSError:
        return False
    return all(is_below(target, roots) for target in (found, *targets))


def describe_forbidden(path: str, folders: Sequence[str]) -> str:
    """Return the one sentence about a path that is absent, unreadable or forbidden: a caller learns nothing about other folders."""
    if not os.path.isabs(path):
        return f"{path!r} is no absolute path. security.paths is set, so name a folder below {', '.join(folders)}: no name of a hub."
    return f"{path} is no folder that an engine's agent can read below security.paths ({', '.join(folders)}), or links lead out of them."
