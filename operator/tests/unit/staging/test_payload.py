"""The body that names a staged version."""

from __future__ import annotations

import base64
import pickle
import pickletools
from pathlib import Path

import pytest

from sglang_rollout.staging.payload import loader_payload, loader_request
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
