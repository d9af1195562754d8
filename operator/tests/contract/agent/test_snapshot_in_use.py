"""A snapshot is not removed between the check and the end of loading, however long the engine takes."""

from __future__ import annotations

import asyncio
import fcntl
import json
import shutil
import struct
from pathlib import Path

import pytest

from sglang_rollout.checkpoints.snapshots import MANIFEST, FileEntry, Manifest
from sglang_rollout.wire.ports import AGENT_CHECKPOINT, DEADLINE_HEADER
from tests.contract.support.agent_pod import Pod, until
from tests.contract.support.stub_engine import StubEngine

pytestmark = pytest.mark.router
LOAD = "update_weights_from_disk"
WANTED = {"run": 1, "step": 3, "label": "step 3"}


@pytest.fixture
async def pod(pod: Pod) -> Pod:
    """The pod, whose gate is open at the base version."""
    await pod.open_with_base()
    return pod


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The smallest complete model."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    return folder


def snapshot(directory: Path, model: Path) -> Path:
    """A snapshot as the trainer writes it, from the engine's own files."""
    folder = directory / "1-3-step-3"
    shutil.copytree(model, folder)
    files = {file.name: FileEntry(bytes=file.stat().st_size, sha256="") for file in folder.iterdir()}
    manifest = Manifest(
        sequence=1, label="step 3", run=1, step=3, epoch=1, fleet_id="f", created="2026-01-01T00:00:00Z", tensors=1, bytes=1, files=files
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json())
    return folder


async def removable(folder: Path) -> bool:
    """Return whether a trainer could remove the snapshot."""
    with (folder / MANIFEST).open("rb") as manifest:
        try:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


async def test_a_snapshot_is_locked_from_the_check_to_the_end_of_loading(pod: Pod, stub: StubEngine, model: Path, tmp_path: Path) -> None:
    folder = snapshot(tmp_path / "snapshots", model)
    ask = {"path": str(folder.parent), "snapshot": WANTED, "fleet_id": "f", "model_path": str(model)}
    reply = await pod.control(AGENT_CHECKPOINT, ask)
    assert (reply.body["refusal"], reply.body["path"]) == (None, str(folder))
    assert not await removable(folder)
    stub.held[LOAD] = asyncio.Event()
    late = await pod.control(f"/{LOAD}", {"model_path": str(folder)}, headers={DEADLINE_HEADER: "0.5"})
    assert late.status == 504
    assert not await removable(folder), "no caller waits for the answer, but the engine still loads"
    stub.held[LOAD].set()
    await until(lambda: removable(folder), 60, "the snapshot may be removed once the engine has loaded it")


async def test_a_snapshot_that_cannot_be_loaded_is_not_locked(pod: Pod, model: Path, tmp_path: Path) -> None:
    folder = snapshot(tmp_path / "snapshots", model)
    (folder / "model.safetensors").write_bytes(b"")
    ask = {"path": str(folder.parent), "snapshot": WANTED, "fleet_id": "f", "model_path": str(model)}
    reply = await pod.control(AGENT_CHECKPOINT, ask)
    assert reply.body["refusal"] is not None
    assert await removable(folder)
