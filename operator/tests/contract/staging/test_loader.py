"""The loader inside a real SGLang, for one and for two tensor ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from e2e.engine import Engine, environment, start_engine

from sglang_rollout.plugin.install import LOADER
from sglang_rollout.staging.copies import Copy
from sglang_rollout.staging.payload import loader_payload, loader_request
from tests.support.ports import free_port
from tests.support.staged import open_copy, stage_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

UNPICKLE = """
import base64, io, json, pickle, sys, warnings
warnings.simplefilter("error")

class Strict(pickle.Unpickler):
    def find_class(self, module, name):
        assert name in {"torch._utils": "_rebuild_tensor_v2", "torch.storage": "_load_from_bytes", "collections": "OrderedDict"}[module]
        return super().find_class(module, name)

found = []
for line in sys.stdin:
    (name, tensor), = Strict(io.BytesIO(base64.b64decode(line))).load()
    found.append([json.loads(name), tensor.tolist(), str(tensor.dtype), str(tensor.device)])
print(json.dumps(found))
"""


class LoaderEngine:
    """An engine that was started with the loader, and the calls that an agent sends to it."""

    def __init__(self, engine: Engine, ranks: int) -> None:
        self.engine = engine
        self.ranks = ranks

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return dict(requests.post(self.engine.url + path, json=body, timeout=60).json())

    def load(self, request: dict[str, Any], verdicts: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Load as an agent does. Return SGLang's answer and the verdicts."""
        body = {"serialized_named_tensors": [loader_payload(request)] * self.ranks, "load_format": LOADER, "flush_cache": False}
        assert self.post("/pause_generation", {"mode": "retract"})
        assert self.post("/begin_weight_update", {})["success"]
        answer = self.post("/update_weights_from_tensor", body | {"weight_version": "staged"})
        assert self.post("/end_weight_update", {})["success"]
        requests.post(self.engine.url + "/flush_cache", timeout=60).raise_for_status()  # it holds keys and values of the old weights
        self.post("/continue_generation", {})
        return answer, [json.loads(path.read_bytes()) for path in sorted(verdicts.glob("*.json"))]

    def load_from_disk(self, folder: Path) -> None:
        assert self.post("/update_weights_from_disk", {"model_path": str(folder)})["success"]

    def state(self) -> tuple[Any, Any]:
        """Return checksums of all ranks, and greedy tokens."""
        body = {"input_ids": [11, 22, 33], "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}
        tokens = self.post("/generate", body)["output_ids"]
        return self.post("/weights_checker", {"action": "checksum"})["ranks"], tokens


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.long, id="tp1"), pytest.param(2, id="tp2")])
def loaded(request: pytest.FixtureRequest, engine_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoaderEngine]:
    folder = tmp_path_factory.mktemp("loader")
    args = ["--custom-weight-loader", LOADER]
    with start_engine(free_port(), args=args, tensor=request.param, log=folder / "engine.log") as engine:
        yield LoaderEngine(engine, request.param)


@pytest.fixture
def verdicts(tmp_path: Path) -> Path:
    (tmp_path / "verdicts").mkdir()
    return tmp_path / "verdicts"


@pytest.fixture
def staged(tmp_path: Path) -> Copy:
    return stage_model(open_copy(tmp_path), environment.model())


def as_model(copy: Copy, folder: Path) -> Path:
    """Return a model folder with the shards of a copy, as ``/update_weights_from_disk`` needs it."""
    shutil.copytree(environment.model(), folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    for name in copy.files:
        (folder / name).symlink_to(copy.folder / name)
    return folder


def test_torch_reads_the_payload_with_three_globals(engine_environment: None) -> None:
    """SGLang's own unpickler allows these globals; the tests below use it."""
    asked: list[dict[str, Any]] = [
        {},
        {"folder": "/run/ü", "shards": ["a" * 300, "𝄞"]},
        {"shards": [f"{n:05d}.safetensors" for n in range(5000)]},
    ]
    command = [str(environment.python(make=False)), "-c", UNPICKLE]
    text = "\n".join(loader_payload(request) for request in asked)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[request, [0], "torch.uint8", "cpu"] for request in asked]


def test_a_loaded_version_equals_the_same_version_from_disk(loaded: LoaderEngine, staged: Copy, verdicts: Path, tmp_path: Path) -> None:
    base = loaded.state()
    answer, found = loaded.load(loader_request(staged, verdicts, "first"), verdicts)
    assert answer["success"], answer
    ranks = [str(rank) for rank in range(loaded.ranks)]
    assert found == [{"ok": True, "wrote": True, "message": "", "rank": rank, "id": "first", "ended": True} for rank in ranks]
    version = loaded.state()
    assert version != base
    loaded.load_from_disk(environment.model())
    assert loaded.state() == base
    loaded.load_from_disk(as_model(staged, tmp_path / "model"))
    assert loaded.state() == version
    loaded.load_from_disk(environment.model())


@pytest.mark.parametrize("fault", ["missing", "short", "header", "request"])
def test_a_refusal_before_the_first_write_changes_nothing(loaded: LoaderEngine, staged: Copy, verdicts: Path, fault: str) -> None:
    base, request, file = loaded.state(), loader_request(staged, verdicts), staged.shard_path(1)
    if fault == "missing":
        file.unlink()
    elif fault == "short":
        os.truncate(file, 1000)
    elif fault == "header":
        file.write_bytes(b"\0" * request["sizes"][1])
    else:
        request["sizes"].pop()
    answer, found = loaded.load(request, verdicts)
    assert answer["success"], "SGLang cannot tell a refusal from a load"
    assert [(verdict["ok"], verdict["wrote"]) for verdict in found] == [(False, False)] * loaded.ranks
    assert all(verdict["message"].startswith("Nothing was loaded: ") for verdict in found)
    assert fault == "request" or str(file) in found[0]["message"]
    assert loaded.state() == base


def test_no_folder_for_verdicts_changes_nothing(loaded: LoaderEngine, staged: Copy, tmp_path: Path) -> None:
    base = loaded.state()
    _, found = loaded.load(loader_request(staged, tmp_path / "absent"), tmp_path / "absent")
    assert found == []
    assert loaded.state() == base


def test_a_fault_after_the_first_write_ends_the_engine(loaded: LoaderEngine, tmp_path: Path, verdicts: Path) -> None:
    other = stage_model(open_copy(tmp_path), environment.model("--hidden", "64"))
    with pytest.raises((requests.RequestException, ValueError)):
        loaded.load(loader_request(other, verdicts), verdicts)
    found = [json.loads(path.read_bytes()) for path in verdicts.glob("*.json")]
    assert found
    assert all((verdict["ok"], verdict["wrote"]) == (False, True) for verdict in found)
    assert any("The load broke off: " in verdict["message"] for verdict in found)
    assert loaded.engine.process is not None
    assert loaded.engine.process.wait(20)
