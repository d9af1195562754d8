"""The plug-in as a folder: SGLang finds it, and it needs nothing but the standard library of the engine's Python."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_rollout import plugin
from sglang_rollout.plugin.install import LOADER, PLUGIN, install_plugin

SOURCES = sorted(Path(plugin.__file__).parent.glob("*.py"))


def test_sglang_finds_one_entry_point_in_the_folder(tmp_path: Path) -> None:
    folder = install_plugin(tmp_path)
    assert folder == tmp_path
    found = [
        (entry.name, entry.value)
        for one in importlib.metadata.distributions(path=[str(folder)])
        for entry in one.entry_points.select(group="sglang.srt.plugins")
    ]
    assert found == [(PLUGIN, f"{PLUGIN}.register:register")]


def test_a_python_without_our_package_imports_every_module(tmp_path: Path) -> None:
    folder = install_plugin(tmp_path)
    modules = [f"{PLUGIN}.{path.stem}" for path in SOURCES if path.stem != "__init__"]
    code = f"import importlib, sys; [importlib.import_module(name) for name in {modules}]; print('sglang_rollout' in sys.modules)"
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, env={"PYTHONPATH": str(folder)}, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")
    module, function = LOADER.rsplit(".", 1)
    assert function in {
        node.name for node in ast.parse((folder / f"{module.replace('.', '/')}.py").read_text()).body if hasattr(node, "name")
    }


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_modules_are_written_for_python_3_10(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 10))
    newer = {"StrEnum", "UTC", "ExceptionGroup", "TaskGroup", "tomllib", "Self", "override"}
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert not names & newer


def test_another_release_is_replaced(tmp_path: Path) -> None:
    folder = install_plugin(tmp_path)
    expected = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    (folder / PLUGIN / "of_an_earlier_release.py").write_text("")
    (folder / PLUGIN / "rules.py").write_text("wrong")
    install_plugin(tmp_path)
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == expected
    for path in SOURCES:
        assert (folder / PLUGIN / path.name).read_bytes() == path.read_bytes()


def test_links_in_the_volume_are_not_followed(tmp_path: Path) -> None:
    volume, elsewhere = tmp_path / "volume", tmp_path / "elsewhere"
    elsewhere.mkdir()
    volume.mkdir()
    (volume / PLUGIN).symlink_to(elsewhere)
    with pytest.raises(OSError, match="is a link"):
        install_plugin(volume)
    assert not list(elsewhere.iterdir())
    (volume / PLUGIN).unlink()
    install_plugin(volume)
    file = volume / PLUGIN / "loader.py"
    file.unlink()
    (elsewhere / "kept").write_text("kept")
    file.symlink_to(elsewhere / "kept")
    install_plugin(volume)
    assert (elsewhere / "kept").read_text() == "kept"
    assert not file.is_symlink()
