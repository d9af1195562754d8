"""The body that names a staged version, and the loader's file."""

from __future__ import annotations

import ast
import base64
import pickle
import pickletools
from pathlib import Path

import pytest

from sglang_rollout.staging import loader
from sglang_rollout.staging.payload import LOADER, install_loader, loader_payload, loader_request
from tests.support.staged import fill, open_copy, random_version, shard


def test_the_payload_has_no_other_globals() -> None:
    data = base64.b64decode(loader_payload({"folder": "/x"}))
    found = [argument for code, argument, _ in pickletools.genops(data) if code.name in ("GLOBAL", "STACK_GLOBAL", "INST")]
    assert found == ["torch._utils _rebuild_tensor_v2", "torch.storage _load_from_bytes", "collections OrderedDict"]
    with pytest.raises((ModuleNotFoundError, AttributeError, pickle.UnpicklingError)):
        pickle.loads(data)  # this environment has no torch


def test_the_request_names_files_with_their_sizes(tmp_path: Path) -> None:
    shards = [shard(5, 6), shard(7)]
    copy = fill(open_copy(tmp_path), shards, random_version(shards))
    request = loader_request(copy, Path("/verdicts"), "7")
    assert request == {
        "folder": str(copy.folder),
        "shards": ["00000.safetensors", "00001.safetensors"],
        "sizes": [(copy.folder / name).stat().st_size for name in request["shards"]],
        "verdicts": "/verdicts",
        "id": "7",
    }


def test_the_loader_is_one_file_without_our_modules(tmp_path: Path) -> None:
    (tmp_path / "loader").mkdir()
    (tmp_path / "loader/sglang_rollout_loader.py").write_text("of an earlier release")
    folder = install_loader(tmp_path)
    module, function = LOADER.split(".")
    file = folder / f"{module}.py"
    assert [path.name for path in folder.iterdir()] == [file.name]
    assert file.read_bytes() == Path(loader.__file__).read_bytes()
    tree = ast.parse(file.read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= {"__future__", "collections.abc", "typing", "json", "os", "torch", "safetensors"}
