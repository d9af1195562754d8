"""Copy the plug-in into a folder for the engine's ``PYTHONPATH``. Called by agents, by ``sglang-rollout local`` and by tests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from .settings import read_settings

PLUGIN = "sglang_rollout_plugin"
"""Name of the package inside SGLang, and of the plug-in in ``SGLANG_PLUGINS``."""
LOADER = f"{PLUGIN}.loader.load"
"""Value of ``--custom-weight-loader``, and ``load_format`` of the call that loads a staged version."""

# The version is constant: with a second folder of another release, SGLang would register all hooks twice.
_METADATA = f"{PLUGIN}-1.dist-info"
_METADATA_FILES = {
    "METADATA": f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 1\n",
    "entry_points.txt": f"[sglang.srt.plugins]\n{PLUGIN} = {PLUGIN}.register:register\n",
}

REPORTS_FOLDER = "plugin-reports"
"""Folder of the reports in :func:`default_folder`."""


def default_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of the plug-in and its reports for engines that run beside their fleet on one machine."""
    return Path(environment.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "sglang-rollout"


def reports_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder in which engines of this machine report: the one in the variable of the plug-in, or the default folder's."""
    settings, _ = read_settings(environment)
    return Path(settings.reports) if settings.reports else default_folder(environment) / REPORTS_FOLDER


def install_plugin(folder: Path) -> Path:
    """Write the plug-in into a folder, replace each file atomically, and delete files of other releases.

    Returns:
        The folder for the engine's ``PYTHONPATH``.

    Raises:
        OSError: The folder cannot be written, or holds a link in place of a folder.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    _write_files(folder / PLUGIN, {path.name: path.read_bytes() for path in sources})
    _write_files(folder / _METADATA, {name: text.encode() for name, text in _METADATA_FILES.items()})
    return folder


def _write_files(folder: Path, files: dict[str, bytes]) -> None:
    if folder.is_symlink():
        raise OSError(f"{folder} is a link")
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name not in files and not path.is_dir():
            path.unlink()
    for name, content in files.items():
        new = folder / f".{name}.new"
        new.unlink(missing_ok=True)
        new.write_bytes(content)
        os.replace(new, folder / name)
