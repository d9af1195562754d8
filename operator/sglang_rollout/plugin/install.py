"""Copy the plug-in into a folder for the engine's ``PYTHONPATH``. Called by agents, by ``sglang-rollout local`` and by tests."""

from __future__ import annotations

import os
from pathlib import Path

PLUGIN = "sglang_rollout_plugin"
"""Name of the package inside SGLang, and of the plug-in in ``SGLANG_PLUGINS``."""
LOADER = f"{PLUGIN}.loader.load"
"""Value of ``--custom-weight-loader``, and ``load_format`` of the call that loads a staged version."""
PLUGIN_FOLDER = "plugin"
"""Name of the folder in a volume of a pod: the engine's ``PYTHONPATH``. It must exist before the engine starts."""

# The version is constant: with a second folder of another release, SGLang would register all hooks twice.
_METADATA = f"{PLUGIN}-1.dist-info"
_METADATA_FILES = {
    "METADATA": f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 1\n",
    "entry_points.txt": f"[sglang.srt.plugins]\n{PLUGIN} = {PLUGIN}.register:register\n",
}


def install_plugin(volume: Path) -> Path:
    """Write the plug-in into a volume, replace each file atomically, and delete files of other releases.

    Returns:
        The folder for the engine's ``PYTHONPATH``.

    Raises:
        OSError: The volume cannot be written, or holds a link in place of a folder.
    """
    folder = volume / PLUGIN_FOLDER
    sources = sorted(Path(__file__).parent.glob("*.py"))
    _write_files(folder / PLUGIN, {path.name: path.read_bytes() for path in sources})
    _write_files(folder / _METADATA, {name: text.encode() for name, text in _METADATA_FILES.items()})
    return folder


def _write_files(folder: Path, files: dict[str, bytes]) -> None:
    for path in (folder.parent, folder):
        if path.is_symlink():
            raise OSError(f"{path} is a link")
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name not in files and not path.is_dir():
            path.unlink()
    for name, content in files.items():
        new = folder / f".{name}.new"
        new.unlink(missing_ok=True)
        new.write_bytes(content)
        os.replace(new, folder / name)
