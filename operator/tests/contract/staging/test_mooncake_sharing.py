"""Shards in memory that other pods read with Mooncake: where they are, and no map of a deleted file."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_rollout.staging import mooncake
from sglang_rollout.staging.mooncake import MooncakeProcess, SharedMemory
from sglang_rollout.wire.reasons import RefusedError
from tests.contract.support.staging_pods import SHARDS, Pod, get, pull_with_mooncake, stage_request, until, use_rdma
from tests.support.staged import (
    LIMIT,
    TICKET,
    copies,
    fill,
    open_copy,
    random_version,
    read_data,
    update_id,
)

pytestmark = pytest.mark.usefixtures("over_tcp")


def maps_of(folder: Path) -> list[str]:
    """Return the maps of this process's children of files in a folder."""
    found: list[str] = []
    for child in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        for process in child.read_text().split():
            maps = Path(f"/proc/{process}/maps")
            found += [line for line in maps.read_text().splitlines() if str(folder) in line] if maps.exists() else []
    return found


async def check_shared(store: Pod, data: list[bytes], folder: Path) -> None:
    """Assert that a version which the store holds from now on is copied without its data port."""
    end, copy = store.hold(SHARDS, data), open_copy(folder)
    assert await pull_with_mooncake(copy, stage_request([store])) == end
    assert (read_data(copy), store.pieces_given) == (data, 0)


# Deleted files


@pytest.mark.usefixtures("library")
async def test_a_deleted_copy_is_no_longer_mapped(pods: list[Pod], tmp_path: Path, data: list[bytes]) -> None:
    """A map would keep the memory of the deleted files."""
    store = pods[1]
    store.hold(SHARDS, data)
    await pull_with_mooncake(open_copy(tmp_path), stage_request([store]))
    folder, child = store.copy.folder, store.sharing
    assert len(maps_of(folder)) >= len(SHARDS) - 1
    await store.copies.keep(set())
    assert maps_of(folder.parent) == []
    assert child.is_alive, "the maps did not end with their process"
    end = store.hold(SHARDS, data)
    assert await pull_with_mooncake(open_copy(tmp_path / "again"), stage_request([store])) == end
    assert store.pieces_given == 0
    assert store.sharing is child


@pytest.mark.usefixtures("library")
async def test_a_copy_that_is_started_again_is_read_again(pods: list[Pod], tmp_path: Path, data: list[bytes]) -> None:
    store, other = pods[1], random_version(SHARDS)
    store.hold(SHARDS, data)
    await pull_with_mooncake(open_copy(tmp_path), stage_request([store]))
    child = store.sharing
    await store.copy.reset()
    assert maps_of(store.copy.folder.parent) == []
    await check_shared(store, other, tmp_path / "again")
    assert store.sharing is child
    assert child.is_alive


@pytest.mark.usefixtures("library")
async def test_a_cancelled_reset_ends_all_maps(pods: list[Pod], tmp_path: Path, data: list[bytes]) -> None:
    store, other = pods[1], random_version(SHARDS)
    store.hold(SHARDS, data)
    await pull_with_mooncake(open_copy(tmp_path), stage_request([store]))
    child = store.sharing
    assert store.memory is not None
    async with store.memory._lock:  # as another call has it
        task = asyncio.create_task(store.copy.reset())
        for _ in range(3):
            await asyncio.sleep(0.01)
            task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert maps_of(store.copy.folder.parent) == []
    await check_shared(store, other, tmp_path / "again")
    assert store.sharing is child
    assert child.is_alive


@pytest.mark.usefixtures("faults")
async def test_a_copy_deleted_meanwhile_ends_no_other_map(pods: list[Pod], data: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    store = pods[1]
    store.hold(SHARDS, data)
    kept = fill(store.copies.open(update_id(1), TICKET, LIMIT), SHARDS, data)
    memory = store.memory
    assert memory is not None
    before = await memory.locate(kept, 0, "127.0.0.1")
    copy, ask, deletions = store.copy, MooncakeProcess.ask, list[asyncio.Task[None]]()

    async def ask_later(child: MooncakeProcess, action: str, **fields: object) -> dict[str, object]:
        if action == "share":
            deletions.append(asyncio.create_task(store.copies.keep({update_id(1)})))
            await until(lambda: not copy.folder.exists())
        return await ask(child, action, **fields)

    monkeypatch.setattr(MooncakeProcess, "ask", ask_later)
    with pytest.raises(RefusedError, match="no shard 0 in memory here"):
        await memory.locate(copy, 0, "127.0.0.1")
    await asyncio.gather(*deletions)
    assert await memory.locate(kept, 0, "127.0.0.1") == before
    assert store.sharing.is_alive


# Where a shard is


@pytest.mark.usefixtures("faults")
async def test_a_caller_over_loopback_does_not_choose_the_address(pods: list[Pod], data: list[bytes]) -> None:
    store = pods[1]
    store.hold(SHARDS, data)
    memory = store.memory
    assert memory is not None
    hosts = ["127.0.0.1", "192.0.2.1", "::1", "192.0.2.1"]
    segments = [(await memory.locate(store.copy, 0, host)).segment.rpartition(":")[0] for host in hosts]
    assert segments == ["127.0.0.1", "192.0.2.1", "192.0.2.1", "192.0.2.1"]
    with pytest.raises(RefusedError, match="address"):
        await memory.locate(store.copy, 0, "")


async def test_a_shared_file_counts_as_written(tmp_path: Path, data: list[bytes], faults: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device for RDMA takes the memory of the whole file, before its pieces arrive."""
    (faults / "rdma").touch()
    use_rdma(monkeypatch, tmp_path)
    held = copies(tmp_path)
    copy, memory = held.open(update_id(), TICKET, LIMIT), SharedMemory(held)
    copy.add_shard(SHARDS[0])
    await memory.locate(copy, 0, "127.0.0.1")
    assert copy.shard_path(0).stat().st_blocks * 512 >= copy.file_sizes[0]
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=len(data[1])))
    copy.add_shard(SHARDS[1])
    await memory.close()


@pytest.mark.usefixtures("library")
async def test_other_pods_cannot_write_to_a_copy(pods: list[Pod], tmp_path: Path, data: list[bytes]) -> None:
    """A pod that reaches the ports of Mooncake may ask it to write, but over TCP the maps are read-only."""
    store = pods[1]
    store.hold(SHARDS, data)
    await pull_with_mooncake(open_copy(tmp_path), stage_request([store]))
    assert {line.split()[1] for line in maps_of(store.copy.folder)} == {"r--s"}


@pytest.mark.usefixtures("faults")
async def test_the_sharing_process_may_be_killed(pods: list[Pod], tmp_path: Path, data: list[bytes]) -> None:
    """The next copy asks for it, so it is started again."""
    store = pods[1]
    end = store.hold(SHARDS, data)
    await pull_with_mooncake(open_copy(tmp_path), stage_request([store]))
    await store.sharing.kill()
    copy = open_copy(tmp_path / "again")
    assert await pull_with_mooncake(copy, stage_request([store])) == end
    assert (read_data(copy), store.pieces_given) == (data, 0)


@pytest.mark.usefixtures("faults")
async def test_the_place_of_a_shard_needs_a_ticket(pods: list[Pod], data: list[bytes]) -> None:
    store = pods[1]
    store.hold(SHARDS, data)
    assert (await get(store.url, f"/{update_id()}/memory/0", ticket="wrong"))[0] == 403
    assert (await get(store.url, f"/{update_id()}/memory/{len(SHARDS)}"))[0] == 404
    assert (await get(store.url, f"/{update_id(1)}/memory/0"))[0] == 404
    status, body, _ = await get(store.url, f"/{update_id()}/memory/0")
    assert (status, b'"segment": "127.0.0.1:' in body) == (200, True)


def test_the_ports_may_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All engines of ``sglang-rollout local`` share the ports."""
    monkeypatch.setenv("MC_MIN_RPC_PORT", "20000")
    variables = mooncake._environment("127.0.0.1", "tcp")
    assert (variables["MC_MIN_RPC_PORT"], variables["MC_MAX_RPC_PORT"]) == ("20000", "30063")
