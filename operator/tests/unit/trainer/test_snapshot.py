"""Snapshots of pushes: complete or absent, the newest are kept, written in the background. No torch."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_rollout.checkpoints.folder import ProblemsError, read_model
from sglang_rollout.checkpoints.publish import folder_name, write_file
from sglang_rollout.checkpoints.snapshots import latest_snapshot, list_snapshots, lock_snapshot, verify_snapshot
from sglang_rollout.trainer import Fleet, PushFailed, SnapshotFailed, Snapshots, connect
from sglang_rollout.trainer import snapshots as module
from sglang_rollout.trainer.push import UPDATE
from sglang_rollout.trainer.snapshots import Job, StagedTensor, write_snapshot
from sglang_rollout.trainer.tensors import TensorSpec
from sglang_rollout.wire.states import Version
from tests.unit.trainer.support.scripted_fleet import FakeFleet, document
from tests.unit.trainer.test_push import GOOD, FakeGroup, Tensor


def nothing() -> None:
    """Do not cancel."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    for name in ("config.json", "tokenizer.json", "merges.txt", "chat_template.jinja"):
        (folder / name).write_text("{}")
    (folder / "config.json").chmod(0o600)
    for name in ("model.safetensors", "old.bin", "model.safetensors.index.json"):
        (folder / name).write_text("not copied")
    return folder


def staged(name: str, values: bytes) -> StagedTensor:
    return StagedTensor(name, "U8", (len(values),), memoryview(values))


def job(directory: Path, model: Path, n: int = 1, **changes: Any) -> Job:
    fixed: dict[str, Any] = {
        "directory": directory, "model": model, "keep": 2, "shard_bytes": 1 << 30, "epoch": 4, "fleet_id": "f",
        "version": Version(run=1, step=n, label=f"step {n}"), "tensors": [staged("a", b"12"), staged("b", b"345")],
    }  # fmt: skip
    return Job(**{**fixed, **changes})


def names(directory: Path) -> list[str]:
    return [snapshot.path.name for snapshot in list_snapshots(directory)]


# One snapshot


def test_a_snapshot_is_a_model_with_a_manifest(tmp_path: Path, model: Path) -> None:
    made = write_snapshot(job(tmp_path, model), check_cancelled=nothing)
    assert made == latest_snapshot(tmp_path)
    assert made.path.name == "1-1-step_1"
    assert (made.manifest.label, made.manifest.run, made.manifest.step, made.manifest.epoch) == ("step 1", 1, 1, 4)
    assert (made.manifest.tensors, made.manifest.bytes) == (2, 5)
    found = {path.name for path in made.path.iterdir()}
    assert found == {"config.json", "tokenizer.json", "merges.txt", "chat_template.jinja", "model.safetensors", "snapshot.json"}
    assert (made.path / "config.json").stat().st_mode & 0o044, "readable for engines, though the model's own was not"
    assert made.path.stat().st_mode & 0o055
    assert (made.path / "model.safetensors").read_bytes().endswith(b"12345")
    verify_snapshot(made)


def test_large_models_are_split_into_files_with_an_index(tmp_path: Path, model: Path) -> None:
    tensors = [staged(name, b"x" * size) for name, size in (("a", 4), ("b", 4), ("huge", 20), ("c", 1))]
    made = write_snapshot(job(tmp_path, model, tensors=tensors, shard_bytes=8), check_cancelled=nothing)
    assert sorted(path.name for path in made.path.glob("*.safetensors")) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert set(read_model(made.path).tensors) == {"a", "b", "huge", "c"}
    assert json.loads((made.path / "model.safetensors.index.json").read_text())["metadata"] == {"total_size": 29}


@pytest.mark.parametrize("damage", ["shorten", "change", "remove"])
def test_verify_names_a_changed_file(tmp_path: Path, model: Path, damage: str) -> None:
    made = write_snapshot(job(tmp_path, model), check_cancelled=nothing)
    file = made.path / "model.safetensors"
    whole = file.read_bytes()
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(whole[:-1] if damage == "shorten" else whole[:-1] + b"!")
    with pytest.raises(ProblemsError, match=r"model\.safetensors"):
        verify_snapshot(made)


def test_a_version_label_cannot_leave_the_directory() -> None:
    assert folder_name(1, 2, "../../etc/x y") == "1-2-.._.._etc_x_y"


# Many snapshots


@given(keep=st.integers(1, 4), versions=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=8))
@settings(max_examples=30, deadline=None)
def test_the_newest_snapshots_are_kept_in_commit_order(
    tmp_path_factory: pytest.TempPathFactory, model: Path, keep: int, versions: list[tuple[int, int]]
) -> None:
    directory = tmp_path_factory.mktemp("many")
    expected: list[str] = []
    for run, n in versions:
        version = Version(run=run, step=n, label="x")
        write_snapshot(job(directory, model, version=version, keep=keep), check_cancelled=nothing)
        name = folder_name(version.run, version.step, version.label)
        expected = [*(other for other in expected if other != name), name][-keep:]
        assert names(directory) == expected
        assert latest_snapshot(directory).path.name == name  # type: ignore[union-attr]
    assert not [entry for entry in directory.iterdir() if entry.name.startswith((".writing", ".removed"))]


def test_a_locked_snapshot_is_removed_later(tmp_path: Path, model: Path) -> None:
    first = write_snapshot(job(tmp_path, model, 1, keep=1), check_cancelled=nothing)
    with lock_snapshot(first.path):
        write_snapshot(job(tmp_path, model, 2, keep=1), check_cancelled=nothing)
        assert names(tmp_path) == ["1-1-step_1", "1-2-step_2"]
        verify_snapshot(first)
        again = write_snapshot(job(tmp_path, model, 1, keep=2), check_cancelled=nothing)
        assert again.path.name == "1-1-step_1.3"
        verify_snapshot(first)
    write_snapshot(job(tmp_path, model, 4, keep=1), check_cancelled=nothing)
    assert names(tmp_path) == ["1-4-step_4"]
    with pytest.raises(ProblemsError, match="is gone"), lock_snapshot(first.path):
        pass


def test_leftovers_of_a_killed_writer_are_ignored_and_removed(tmp_path: Path, model: Path) -> None:
    code = """
import os, sys
sys.path[:0] = sys.argv[3:]
from pathlib import Path
from tests.unit.trainer.test_snapshot import job
from sglang_rollout.trainer.snapshots import write_snapshot
calls = []
def check_cancelled():
    calls.append(1)
    if len(calls) > 3:
        os.kill(os.getpid(), 9)
write_snapshot(job(Path(sys.argv[1]), Path(sys.argv[2])), check_cancelled=check_cancelled)
"""
    paths = [path for path in sys.path if path]
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), str(model), *paths], capture_output=True, check=False)
    assert done.returncode == -9, done.stderr.decode()
    left = [entry for entry in tmp_path.iterdir() if entry.name.startswith(".writing-")]
    assert left
    assert any(left[0].iterdir())
    assert latest_snapshot(tmp_path) is None
    write_snapshot(job(tmp_path, model, 2), check_cancelled=nothing)
    assert names(tmp_path) == ["1-2-step_2"]
    assert not left[0].exists()


@pytest.mark.parametrize("fails_at", range(1, 9))
def test_a_failed_write_keeps_earlier_snapshots(tmp_path: Path, model: Path, fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    write_snapshot(job(tmp_path, model, 1), check_cancelled=nothing)
    real, calls = os.fsync, []

    def failing(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == fails_at:
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    # Five files, the manifest, its folder, and the directory.
    with pytest.raises(SnapshotFailed, match="Input/output error"):
        write_snapshot(job(tmp_path, model, 2), check_cancelled=nothing)
    monkeypatch.undo()
    assert names(tmp_path)[0] == "1-1-step_1"
    for snapshot in list_snapshots(tmp_path):
        verify_snapshot(snapshot)
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".writing")]


def test_a_directory_without_permission_is_reported_with_the_user(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, parts: Any, check_cancelled: Any) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(module, "write_file", refuse)
    with pytest.raises(SnapshotFailed, match=rf"Permission denied\. User {os.getuid()} may not write there: .*fsGroup"):
        write_snapshot(job(tmp_path, model), check_cancelled=nothing)


def test_a_full_disk_is_reported_with_sizes(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, parts: Any, check_cancelled: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_file", full)
    with pytest.raises(SnapshotFailed, match=r"is full: a snapshot takes 0 MiB, \d+ MiB are free. Use a larger volume"):
        write_snapshot(job(tmp_path, model), check_cancelled=nothing)
    assert names(tmp_path) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(SnapshotFailed, match="is full"):
        write_snapshot(job(tmp_path, model), check_cancelled=nothing)


def test_a_second_writer_is_refused(tmp_path: Path, model: Path) -> None:
    def while_writing() -> None:
        with pytest.raises(SnapshotFailed, match="Another process writes"):
            write_snapshot(job(tmp_path, model, 2), check_cancelled=nothing)

    write_snapshot(job(tmp_path, model, 1), check_cancelled=while_writing)
    assert names(tmp_path) == ["1-1-step_1"]


# With a fleet


class Group(FakeGroup):
    """A scripted group whose tensors have bytes."""

    def host_bytes(self, tensor: Tensor) -> memoryview:
        return memoryview(b"\1" * (4 * tensor.shape[0]))

    def close(self) -> None:
        """Nothing to leave."""


@pytest.fixture
def push(fake: FakeFleet) -> Iterator[Callable[..., Any]]:
    """Pushes one version after another; ``committed`` says what the fleet holds then."""
    paths = ("/begin_weight_update", UPDATE, "/end_weight_update", "/destroy_weights_update_group")
    fake.replies |= dict.fromkeys(paths, GOOD)
    fleets: list[Fleet] = []

    def one(snapshots: Snapshots | None, n: int, committed: int | None = None, **options: Any) -> Any:
        if not fleets:
            fleets.append(connect(fake.url))
        fleet = fleets[0]
        fleet.snapshots = snapshots
        group = {"name": "g", "epoch": 1, "world_size": 3, "master": "m", "backend": "gloo", "members": []}
        held = {"run": 1, "step": n, "label": str(n if committed is None else committed)}
        fake.replies["/fleet"] = (200, document(groups=[group], committed=held))
        fleet._groups.group = Group()  # type: ignore[assignment]
        return fleet.push({"a": Tensor((2,)), "b": Tensor((1,))}, version=n, **options)

    yield one
    for fleet in fleets:
        fleet.close()


def test_every_nth_push_becomes_a_snapshot(tmp_path: Path, model: Path, push: Callable[..., Any]) -> None:
    snapshots = Snapshots(tmp_path, model=model, every=2, keep=2)
    for n in range(1, 8):
        result = push(snapshots, n)
        assert (result.snapshot is not None) == (n % 2 == 0)
        snapshots.wait()
    assert [(s.manifest.label, s.manifest.step) for s in list_snapshots(tmp_path)] == [("4", 4), ("6", 6)]
    assert push(snapshots, 8, snapshot=False).snapshot is None
    assert push(snapshots, 9, snapshot=True).snapshot.result(10).manifest.label == "9"
    assert set(read_model(latest_snapshot(tmp_path).path).tensors) == {"a", "b"}  # type: ignore[union-attr]


def test_a_push_without_snapshots_refuses_to_write_one(push: Callable[..., Any]) -> None:
    assert push(None, 1).snapshot is None
    with pytest.raises(ValueError, match=r"fleet.snapshots = Snapshots"):
        push(None, 2, snapshot=True)


def test_an_uncommitted_push_is_not_written(tmp_path: Path, model: Path, push: Callable[..., Any], fake: FakeFleet) -> None:
    snapshots = Snapshots(tmp_path, model=model)
    with pytest.raises(PushFailed, match="committed version"):
        push(snapshots, 1, committed=0)
    fake.replies["/end_weight_update"] = (400, {"success": False, "message": "engine e1 did not make it"})
    with pytest.raises(PushFailed, match="did not make it"):
        push(snapshots, 2)
    assert snapshots.wait() is None
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_that_fails_does_not_fail_the_push(
    tmp_path: Path, model: Path, push: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    snapshots = Snapshots(tmp_path / "file", model=model)
    assert push(snapshots, 1).version == "1"
    with pytest.raises(SnapshotFailed, match="could not be written"):
        snapshots.wait()
    assert "could not be written" in caplog.text
    odd = Snapshots(tmp_path / "odd", model=model)
    odd_type = TensorSpec("a", "complex32", (2,), 4)
    odd.begin().add(odd_type, Tensor((2,)), Group().host_bytes)  # type: ignore[union-attr]
    assert "tensor a could not be copied" in caplog.text


def test_one_snapshot_is_written_at_a_time(
    tmp_path: Path, model: Path, push: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = threading.Event()

    def waiting(*args: Any) -> Any:
        slow.wait(10)
        return write_file(*args)

    monkeypatch.setattr(module, "write_file", waiting)
    snapshots = Snapshots(tmp_path, model=model)
    first = push(snapshots, 1)
    assert push(snapshots, 2).snapshot is None, "no second copy of the model in host memory"
    assert "still being written" in caplog.text
    assert names(tmp_path) == []
    threading.Timer(0.2, slow.set).start()
    third = push(snapshots, 3, snapshot=True)  # asked for: waits
    assert first.snapshot.done()
    assert third.snapshot.result(10).manifest.label == "3"


def test_a_deadline_ends_a_slow_snapshot(tmp_path: Path, model: Path, push: Callable[..., Any]) -> None:
    snapshots = Snapshots(tmp_path, model=model, deadline=1e-9)
    push(snapshots, 1)
    with pytest.raises(SnapshotFailed, match="within 0 s"):
        snapshots.wait(5)
    assert names(tmp_path) == []


def test_a_model_that_is_not_a_folder_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ValueError, match="snapshot_download"):
        Snapshots(tmp_path, model="Qwen/Qwen2.5-7B-Instruct")
    with pytest.raises(ValueError, match="keep is 0"):
        Snapshots(tmp_path, model=model, keep=0)
