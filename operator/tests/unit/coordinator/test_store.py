"""Records and intents: a lost record is written again, never replaced by an empty one, and a failed write is retried."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.api.intent import Intent
from sglang_rollout.coordinator import record as store
from sglang_rollout.coordinator.leadership import DeposedError, take_over
from sglang_rollout.coordinator.record import (
    RECORD_KEY,
    ConfigMapRecord,
    FileRecord,
    HigherTermError,
    RecordWriter,
    StoreError,
)
from sglang_rollout.coordinator.smg import plan_changes
from sglang_rollout.coordinator.wanted_engines import FileIntent, addresses_by_hostname, gate_url
from sglang_rollout.kube.errors import ApiUnavailable, Conflict, NotFound
from sglang_rollout.wire.record import Record
from sglang_rollout.wire.states import Version


def record(n: int, term: int = 1) -> Record:
    return Record(term=term, epoch=1, committed=Version(run=1, step=n, label=str(n)))


class FakeKube:
    """One ConfigMap."""

    def __init__(self) -> None:
        self.data: dict[str, str] | None = {}
        self.version = 1
        self.away = False
        self.full = False
        self.writes = 0

    async def get(self, resource: Any, namespace: str, name: str) -> dict[str, Any]:
        if self.away:
            raise ApiUnavailable("the API server cannot be reached")
        if self.data is None:
            raise NotFound("not found")
        return {"metadata": {"name": name, "resourceVersion": str(self.version)}, "data": dict(self.data)}

    async def merge_patch(self, resource: Any, namespace: str, name: str, patch: Any, *, resource_version: str) -> Any:
        if self.away or self.full:
            raise ApiUnavailable("the API server cannot be reached")
        if resource_version != str(self.version):
            raise Conflict("changed")
        assert self.data is not None
        self.data.update(patch["data"])
        self.version += 1
        self.writes += 1
        return {}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "BACKGROUND_INTERVAL_SECONDS": 0.01,
        "FIRST_RETRY_SECONDS": 0.01,
        "LAST_RETRY_SECONDS": 0.02,
        "CHECK_SECONDS": 0.05,
    }.items():
        monkeypatch.setattr(store, name, value)


async def until(check: Any) -> None:
    async with asyncio.timeout(3):
        while not check():
            await asyncio.sleep(0.005)


async def test_a_record_file_is_replaced_atomically(tmp_path: Path) -> None:
    files = FileRecord(tmp_path / "deep" / "record.json")
    assert await files.read() is None
    await files.write(record(1))
    await files.write(record(2))
    assert await files.read() == record(2)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["record.json"]


async def test_a_slow_write_does_not_replace_a_newer_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write to a volume that hangs cannot be cancelled, and ends after the next write."""
    hung, really = threading.Event(), os.fsync
    first = [hung]

    def fsync(handle: int) -> None:
        if first:
            first.pop().wait(30)
        really(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(store, "WRITE_DEADLINE_SECONDS", 0.2)
    files = FileRecord(tmp_path / "record.json")
    writer = RecordWriter(files)
    assert not await writer.write(record(5))
    monkeypatch.setattr(store, "WRITE_DEADLINE_SECONDS", 30.0)
    assert await writer.write(record(6))
    hung.set()
    await until(lambda: [path.name for path in tmp_path.iterdir()] == ["record.json"])
    assert await files.read() == record(6)


async def test_a_broken_file_counts_as_lost(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text("{")
    assert await FileRecord(tmp_path / "record.json").read() is None


async def test_an_empty_config_map_holds_no_record() -> None:
    kube = FakeKube()
    maps = ConfigMapRecord(kube, "ns", "demo")  # type: ignore[arg-type]
    assert await maps.read() is None
    await maps.write(record(1))
    assert await maps.read() == record(1)
    await maps.write(record(1))
    assert kube.writes == 1


async def test_a_coordinator_with_a_lower_term_cannot_write() -> None:
    kube = FakeKube()
    maps = ConfigMapRecord(kube, "ns", "demo")  # type: ignore[arg-type]
    await maps.write(record(5, term=3))
    with pytest.raises(HigherTermError):
        await maps.write(record(6, term=2))
    assert await maps.read() == record(5, term=3)


def announcing(meanwhile: Callable[[], Awaitable[None]]) -> Callable[[int], Awaitable[None]]:
    """Call ``meanwhile`` during the first announcement of a term, as the previous coordinator may do."""
    left = [meanwhile]

    async def announce(term: int) -> None:
        if left:
            await left.pop()()

    return announce


async def nothing() -> None:
    """Announce a term while no other coordinator writes."""


async def test_a_commit_written_during_a_takeover_is_not_lost() -> None:
    kube = FakeKube()
    maps = ConfigMapRecord(kube, "ns", "demo")  # type: ignore[arg-type]
    await maps.write(record(5, term=3))
    late = announcing(lambda: maps.write(record(6, term=3)))
    assert await take_over(maps, late, 1) == (4, record(6, term=3))
    assert await maps.read() == record(6, term=4)
    with pytest.raises(HigherTermError):
        await maps.write(record(7, term=3))


async def test_a_new_coordinator_ends_when_a_newer_one_has_written() -> None:
    kube = FakeKube()
    maps = ConfigMapRecord(kube, "ns", "demo")  # type: ignore[arg-type]
    await maps.write(record(5, term=3))
    with pytest.raises(DeposedError, match="is of term 9, this coordinator is of 4"):
        await take_over(maps, announcing(lambda: maps.write(record(5, term=9))), 1)
    assert await maps.read() == record(5, term=9)


async def test_a_commit_written_while_the_new_coordinator_cannot_write_is_not_lost() -> None:
    kube = FakeKube()
    maps = ConfigMapRecord(kube, "ns", "demo")  # type: ignore[arg-type]
    await maps.write(record(5, term=3))

    async def fill() -> None:
        kube.full = True
        asyncio.get_running_loop().call_later(0.2, free)

    def free() -> None:
        kube.full = False
        kube.data = {RECORD_KEY: record(6, term=3).model_dump_json()}

    assert await take_over(maps, announcing(fill), 1) == (4, record(6, term=3))
    assert await maps.read() == record(6, term=4)


async def test_a_new_coordinator_leads_with_what_it_read_when_it_cannot_write() -> None:
    kube = FakeKube()
    maps = ConfigMapRecord(kube, "ns", "demo")  # type: ignore[arg-type]
    assert await take_over(maps, announcing(nothing), 2) == (2, None)
    await maps.write(record(5, term=3))

    async def leave() -> None:
        kube.away = True

    assert await take_over(maps, announcing(leave), 8) == (8, record(5, term=3))


async def test_a_deleted_config_map_is_written_again_with_the_record(quick: None) -> None:
    kube = FakeKube()
    maps = ConfigMapRecord(kube, "ns", "demo")  # type: ignore[arg-type]
    writer = RecordWriter(maps)
    task = asyncio.create_task(writer.run())
    try:
        assert await writer.write(record(4))
        kube.data = None
        await asyncio.sleep(0.1)
        kube.data, kube.version = {}, 70
        await until(lambda: kube.data)
        assert await maps.read() == record(4)
    finally:
        task.cancel()


async def test_a_commit_does_not_wait_for_an_unreachable_api_server(quick: None) -> None:
    kube = FakeKube()
    maps = ConfigMapRecord(kube, "ns", "demo")  # type: ignore[arg-type]
    writer = RecordWriter(maps)
    kube.away = True
    assert not await writer.write(record(4))
    assert "cannot be reached" in writer.problem
    task = asyncio.create_task(writer.run())
    try:
        kube.away = False
        await until(lambda: kube.writes == 1)
        assert await maps.read() == record(4)
        await until(lambda: writer.problem == "")
    finally:
        task.cancel()


@pytest.mark.parametrize("steps", range(5))
async def test_a_writer_that_is_cancelled_just_before_a_write_ends(quick: None, steps: int) -> None:
    """Otherwise a coordinator that receives SIGTERM would continue until it is killed."""
    task = asyncio.create_task((writer := RecordWriter(ConfigMapRecord(FakeKube(), "ns", "demo"))).run())  # type: ignore[arg-type]
    await asyncio.sleep(0.02)
    writer.save(record(1))
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=1)
    task.cancel()
    assert done


async def test_several_saves_are_written_once(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "BACKGROUND_INTERVAL_SECONDS", 0.2)
    kube = FakeKube()
    writer = RecordWriter(ConfigMapRecord(kube, "ns", "demo"))  # type: ignore[arg-type]
    task = asyncio.create_task(writer.run())
    try:
        for n in range(50):
            writer.save(record(n))
            await asyncio.sleep(0.002)
        await until(lambda: kube.data and '"step":49' in kube.data["weights.json"])
        assert kube.writes <= 4
    finally:
        task.cancel()


async def test_an_unreachable_store_raises_store_error() -> None:
    kube = FakeKube()
    kube.away = True
    with pytest.raises(StoreError, match="cannot be reached"):
        await ConfigMapRecord(kube, "ns", "demo").read()  # type: ignore[arg-type]


async def test_the_intent_is_read_again_when_its_file_changes(tmp_path: Path, quick: None) -> None:
    path = tmp_path / "intent.json"
    intents = FileIntent(path).follow()
    waiting = asyncio.ensure_future(anext(intents))
    await asyncio.sleep(0.03)
    path.write_text("{ not yet")
    await asyncio.sleep(0.03)
    path.write_text(Intent(generation=1, name="d", namespace="n", engines=[]).model_dump_json())
    assert (await waiting).generation == 1
    path.write_text(Intent(generation=2, name="d", namespace="n", engines=[]).model_dump_json())
    async with asyncio.timeout(2):
        assert (await anext(intents)).generation == 2


def test_engines_are_found_before_they_are_ready() -> None:
    slices: list[dict[str, Any]] = [
        {"endpoints": [{"hostname": "d-engine-0-0", "addresses": ["10.0.0.5"], "conditions": {"ready": False}}]},
        {"endpoints": [{"addresses": ["10.0.0.6"]}, {"hostname": "d-engine-1-0", "addresses": ["fd00::7"]}]},
        {"endpoints": None},
    ]
    assert addresses_by_hostname(slices) == {"d-engine-0-0": "10.0.0.5", "d-engine-1-0": "fd00::7"}
    assert gate_url("10.0.0.5") == "http://10.0.0.5:30000"
    assert gate_url("fd00::7") == "http://[fd00::7]:30000"


def test_changes_to_smgs_workers() -> None:
    todo = plan_changes(frozenset({"http://a", "http://b", "http://c"}), {"1": "http://a/", "2": "http://z"}, frozenset({"http://b"}))
    assert (todo.add, todo.remove) == (("http://c",), ("2",))
    assert plan_changes(frozenset({"http://a"}), {"1": "http://a"}, frozenset()) == plan_changes(frozenset(), {}, frozenset())
