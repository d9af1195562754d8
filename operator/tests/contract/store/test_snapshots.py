"""Snapshots of the weight store: written behind commits, loaded by a store that has lost everything else, and never a half one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from e2e.kube import eventually

from sglang_rollout.checkpoints.snapshots import MANIFEST, list_snapshots, verify_snapshot
from sglang_rollout.staging.copies import MANIFEST as COPY_MANIFEST
from sglang_rollout.staging.copies import shard_file
from sglang_rollout.wire.ports import (
    METRICS,
    STAGED,
    STORE_COMMIT,
    STORE_DROP,
    STORE_FETCH,
    STORE_READ,
    STORE_SEAL,
    STORE_VERIFY,
    TICKET_HEADER,
)
from tests.contract.store.test_uploads import SIZES, piece, upload
from tests.contract.support.store_process import SIZE_LIMIT, TICKET, StoreProcess, new_update, store_process, version

pytestmark = pytest.mark.timeout(180)

SECONDS = 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "snapshots"


@pytest.fixture
def store(tmp_path: Path, folder: Path) -> Iterator[StoreProcess]:
    with store_process(tmp_path, python=sys.executable, options=("--snapshots", str(folder), "--snapshots-keep", "2")) as made:
        yield made


def commit(store: StoreProcess, step: int, *, seed: int | None = None, author: str = "") -> str:
    """Upload a version, and tell the store that it is committed."""
    update = new_update()
    upload(store, update, step if seed is None else seed)
    assert store.seal(update, step)[0] == 200
    status, body = announce(store, update, step, author)
    assert status == 200, body
    return update


def announce(store: StoreProcess, update: str, step: int, author: str = "") -> tuple[int, dict[str, Any]]:
    body = {"update": update, "version": version(step), "author": author, "epoch": 3, "fleet_id": "fleet"}
    return store.call(STORE_COMMIT, body)


def state(store: StoreProcess) -> dict[str, Any]:
    return dict(store.status()["snapshots"])


def updates(store: StoreProcess) -> list[str]:
    return [each["update"] for each in state(store)["snapshots"] if not each["problem"]]


def wait_for(store: StoreProcess, update: str) -> None:
    eventually("the snapshot is written", lambda: update in updates(store), within=SECONDS)


def lose_memory(store: StoreProcess) -> None:
    """End the store, and delete all but its snapshots."""
    store.stop()
    shutil.rmtree(store.volume)
    shutil.rmtree(store.folder / "state")
    store.start()


def load(store: StoreProcess, update: str, digest: str, **changes: Any) -> tuple[int, dict[str, Any]]:
    body = {"update": update, "version": version(1), "parents": [], "ticket": TICKET, "size_limit": SIZE_LIMIT, "digest": digest}
    return store.call(STORE_FETCH, body | changes)


def folder_of(directory: Path, update: str) -> Path:
    return next(each.path for each in list_snapshots(directory) if each.manifest.update == update)


def damage(directory: Path, update: str) -> None:
    """Change one byte of a snapshot's tensors."""
    with (folder_of(directory, update) / shard_file(0)).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")


def test_a_store_that_has_lost_its_memory_loads_the_version_from_its_snapshot(store: StoreProcess, folder: Path) -> None:
    update = commit(store, 1, author="team/trainer")
    wait_for(store, update)
    digest, data = store.updates()[update], store.data_digest(update, 0)
    (row,) = state(store)["snapshots"]
    assert (row["version"], row["digest"], row["author"]) == (version(1), digest, "team/trainer")
    (snapshot,) = list_snapshots(folder)
    assert (snapshot.manifest.epoch, snapshot.manifest.fleet_id, snapshot.manifest.bytes) == (3, "fleet", sum(SIZES.values()))
    verify_snapshot(snapshot)
    lose_memory(store)
    eventually("the snapshots are listed", lambda: updates(store) == [update], within=SECONDS)
    status, body = load(store, update, digest)
    assert status == 200, body
    assert store.updates() == {update: digest}
    assert store.data_digest(update, 0) == data
    store.restart()
    assert store.updates() == {update: digest}, "it is a copy like any other"


def test_only_committed_versions_are_written_and_only_the_newest_stay(store: StoreProcess, folder: Path) -> None:
    unfinished = new_update()
    upload(store, unfinished)
    assert announce(store, unfinished, 9)[0] == 409, "it is not complete"
    assert store.call(STORE_SEAL, {"update": unfinished, "version": version(9)})[0] == 200
    made = []
    for step in (1, 2, 3):
        made.append(commit(store, step))
        wait_for(store, made[-1])
    assert updates(store) == made[-2:]
    assert [each.manifest.step for each in list_snapshots(folder)] == [2, 3]
    assert announce(store, made[-1], 3)[0] == 200, "a repeated call writes nothing"
    assert state(store)["writing"] == ""


def test_every_second_version_is_written(tmp_path: Path, folder: Path) -> None:
    with store_process(tmp_path, python=sys.executable, options=("--snapshots", str(folder), "--snapshots-every", "2")) as store:
        made = []
        for step in (1, 2, 3):
            made.append(commit(store, step))
            assert announce(store, made[-1], step)[0] == 200, "a repeated call is not counted"
            if step != 2:
                wait_for(store, made[-1])
        assert updates(store) == [made[0], made[2]]


def test_a_damaged_snapshot_is_found_and_never_loaded(store: StoreProcess, folder: Path) -> None:
    update = commit(store, 1)
    wait_for(store, update)
    digest = store.updates()[update]
    damage(folder, update)
    lose_memory(store)
    eventually("the snapshots are listed", lambda: updates(store) == [update], within=SECONDS)
    status, body = load(store, update, digest)
    assert (status, body["code"]) == (502, "UpstreamFailed"), body
    assert "is damaged: piece 2 of 00000.safetensors does not have its SHA-256" in body["message"]
    assert store.updates() == {}, "nothing of it stays"
    assert updates(store) == []
    assert "is damaged" in state(store)["snapshots"][0]["problem"]
    assert "is not used" in store.log()


def test_verify_reads_all_files(store: StoreProcess, folder: Path) -> None:
    update = commit(store, 1)
    wait_for(store, update)
    assert store.call(STORE_VERIFY, {"update": update})[1]["problems"] == []
    damage(folder, update)
    (problem,) = store.call(STORE_VERIFY, {"update": update})[1]["problems"]
    assert "00000.safetensors has changed" in problem
    assert updates(store) == []
    assert store.call(STORE_VERIFY, {"update": new_update()})[0] == 404


@pytest.mark.parametrize("killed", ["writer", "store"])
def test_a_snapshot_whose_writer_was_killed_is_never_used(store: StoreProcess, folder: Path, killed: str) -> None:
    first = commit(store, 1)
    wait_for(store, first)
    os.mkfifo(block := store.volume / "block")
    second = new_update()
    upload(store, second, 2)
    assert store.seal(second, 2)[0] == 200
    # The writer waits in the second file, after it has written the first one.
    path = store.volume / second / shard_file(1)
    kept = path.rename(path.with_suffix(".kept"))
    block.rename(path)
    assert announce(store, second, 2)[0] == 200
    eventually("a part is written", lambda: list(folder.glob(f".writing-*/{shard_file(0)}")), within=SECONDS)
    writers = subprocess.run(["pgrep", "-P", str(store.process.pid), "-f", "snapshot_writer"], capture_output=True, text=True, check=True)  # type: ignore[union-attr]
    path.unlink()
    kept.rename(path)
    if killed == "writer":
        os.kill(int(writers.stdout), signal.SIGKILL)
        eventually("the failure is noted", lambda: "ended with code -9" in state(store)["message"], within=SECONDS)
        assert updates(store) == [first]
        assert store.updates()[second], "the version itself is untouched"
    store.restart()
    eventually("the snapshots are listed", lambda: updates(store) == [first], within=SECONDS)
    assert not list(folder.glob(".writing-*")), "the start removes what was not complete"
    assert announce(store, second, 2)[0] == 200
    wait_for(store, second)
    assert updates(store) == [first, second]


def test_a_full_volume_fails_no_update(tmp_path: Path) -> None:
    volume = tmp_path / "full"
    volume.mkdir()
    mount = f'mount -t tmpfs -o size=110m none {volume} && exec "$@"'
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount, "sh", "true"], check=False).returncode:
        pytest.skip("this machine does not let the test mount a small volume")
    wrapper = ("unshare", "--mount", "sh", "-c", mount, "sh")
    with store_process(tmp_path, python=sys.executable, options=("--snapshots", str(volume)), wrapper=wrapper) as store:
        first = commit(store, 1)
        wait_for(store, first)
        second = commit(store, 2)
        eventually("the failure is noted", lambda: "is full" in state(store)["message"], within=SECONDS)
        assert "a snapshot takes 32 MiB" in state(store)["message"]
        assert "is full" in store.log()
        metrics = requests.get(f"http://127.0.0.1:{store.metrics_port}{METRICS}", timeout=10).text
        assert "sglang_rollout_store_snapshot_failures_total 1.0" in metrics
        assert "sglang_rollout_store_snapshots 1.0" in metrics
        assert updates(store) == [first]
        assert store.updates()[second], "the version itself is untouched"
        third = commit(store, 3)
        assert store.updates()[third], "and so are later updates"


def test_a_folder_that_cannot_be_written_fails_no_update(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with store_process(tmp_path, python=sys.executable, options=("--snapshots", str(tmp_path / "file" / "snapshots"))) as store:
        update = commit(store, 1)
        assert store.updates()[update]
        eventually("the failure is noted", lambda: "Not a directory" in state(store)["message"], within=SECONDS)


def test_readers_need_a_ticket_for_a_snapshot(store: StoreProcess) -> None:
    update = commit(store, 1)
    wait_for(store, update)
    assert store.call(STORE_DROP, {"keep": []})[0] == 200
    url, headers = f"{store.data_url}{STAGED}/{update}/pieces/0/0", {TICKET_HEADER: "reader"}
    assert requests.get(url, headers=headers, timeout=10).status_code == 404
    assert store.call(STORE_READ, {"update": update, "ticket": "reader"})[0] == 200
    assert requests.get(url, headers={TICKET_HEADER: "other"}, timeout=10).status_code == 403
    assert requests.get(url, headers={TICKET_HEADER: ""}, timeout=10).status_code == 403
    answer = requests.get(url, headers=headers, timeout=10)
    assert answer.content == piece((0, 0), 1)


def test_a_volume_that_fails_for_a_while_makes_no_snapshot_a_damaged_one(store: StoreProcess, folder: Path) -> None:
    update = commit(store, 1)
    wait_for(store, update)
    digest = store.updates()[update]
    assert store.call(STORE_DROP, {"keep": []})[0] == 200
    index = folder_of(folder, update) / COPY_MANIFEST
    kept = index.rename(index.with_suffix(".kept"))
    index.mkdir()  # whose content no process can read as a file
    status, body = load(store, update, digest)
    assert (status, "cannot be read: Is a directory" in body["message"]) == (503, True), body
    index.rmdir()
    kept.rename(index)
    assert load(store, update, digest)[0] == 200


@pytest.mark.parametrize("hanging", ["pieces", "index"])
def test_a_volume_that_hangs_delays_no_other_version(store: StoreProcess, folder: Path, hanging: str) -> None:
    update = commit(store, 1)
    wait_for(store, update)
    digest = store.updates()[update]
    assert store.call(STORE_DROP, {"keep": []})[0] == 200
    assert store.call(STORE_READ, {"update": update, "ticket": "reader"})[0] == 200
    # A process that opens a pipe for reading waits for a writer, as for a server that does not answer.
    hung = folder_of(folder, update) / (shard_file(0) if hanging == "pieces" else COPY_MANIFEST)
    hung.unlink()
    os.mkfifo(hung)
    url, others = f"{store.data_url}{STAGED}/{update}/pieces/0/0", [new_update(), new_update()]
    for _ in range(10):
        if hanging == "pieces":
            store.pool.submit(requests.get, url, headers={TICKET_HEADER: "reader"}, timeout=60)
        else:
            store.pool.submit(load, store, update, digest, keep=others)
    for step, other in enumerate(others, start=2):
        upload(store, other, step)
        assert store.seal(other, step)[0] == 200


def test_a_folder_without_a_manifest_is_no_snapshot(store: StoreProcess, folder: Path) -> None:
    update = commit(store, 1)
    wait_for(store, update)
    (folder_of(folder, update) / MANIFEST).write_text("{")
    store.restart()
    eventually("the snapshots are listed", lambda: "it has no readable snapshot.json" in store.log(), within=SECONDS)
    assert state(store)["snapshots"] == []
