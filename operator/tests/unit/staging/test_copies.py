"""Copies in a folder: pieces in any order, restarts, and what is refused."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_rollout.checkpoints.folder import read_header
from sglang_rollout.staging import copies as staging
from sglang_rollout.staging import files
from sglang_rollout.staging.copies import MANIFEST, Copies, Copy
from sglang_rollout.staging.files import write_at
from sglang_rollout.staging.index import StagedError, StagedFault, version_digest
from sglang_rollout.wire.staged import IndexEntry, Piece, Shard, VersionEnd
from sglang_rollout.wire.states import Version
from tests.support.staged import (
    LIMIT,
    PIECE,
    TICKET,
    all_pieces,
    copies,
    fill,
    fill_shard,
    open_copy,
    pieces,
    random_version,
    read_data,
    sha256,
    shard,
    update_id,
    use_small_pieces,
)

SHARDS = [shard(2 * PIECE + 1, 30), shard(PIECE), shard(0), shard(7)]
VERSION = Version(run=1, step=2, label="step-2")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_pieces(monkeypatch)


async def in_parts(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        await asyncio.sleep(0)
        yield data[start : start + size]


def add_shards(copy: Copy, shards: list[Shard]) -> Copy:
    for each in shards:
        copy.add_shard(each)
    return copy


def fault_of(error: pytest.ExceptionInfo[StagedError]) -> StagedFault:
    return error.value.fault


# Any order of pieces


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_order_of_pieces_with_repeats_gives_the_same_files(data: st.DataObject) -> None:
    contents = random_version(SHARDS)
    order = data.draw(st.permutations(all_pieces(SHARDS) * 2))
    parts = data.draw(st.integers(1, 3 * PIECE))

    async def receive(copy: Copy) -> None:
        for number, piece in order:
            held = pieces(contents[number])[piece]
            await copy.receive_piece(number, piece, sha256(held), in_parts(held, parts))

    with TemporaryDirectory() as folder:
        copy = add_shards(open_copy(Path(folder)), SHARDS)
        asyncio.run(receive(copy))
        end = copy.seal(VERSION)
        assert read_data(copy) == contents
        assert end.digest == version_digest(SHARDS, copy.index.digests)
        assert [read_header(copy.folder / name).file_bytes for name in copy.files] == copy.file_sizes


async def test_pieces_may_arrive_at_once(tmp_path: Path) -> None:
    copy, contents = add_shards(open_copy(tmp_path), SHARDS), random_version(SHARDS)
    calls = []
    for number, piece in all_pieces(SHARDS) * 3:
        held = pieces(contents[number])[piece]
        calls.append(copy.receive_piece(number, piece, sha256(held), in_parts(held, 100)))
    assert (await asyncio.gather(*calls)).count(True) == len(all_pieces(SHARDS))
    copy.seal()
    assert read_data(copy) == contents


async def test_a_piece_that_is_there_is_not_read_again(tmp_path: Path) -> None:
    async def never() -> AsyncIterator[bytes]:
        pytest.fail("the source was read")
        yield b""  # type: ignore[unreachable]

    copy, data = add_shards(open_copy(tmp_path), [shard(5)]), b"12345"
    assert copy.write_piece(0, 0, data, sha256(data))
    assert not copy.write_piece(0, 0, data, sha256(data))
    assert not await copy.receive_piece(0, 0, sha256(data), never())
    with pytest.raises(StagedError, match="there already, with other bytes"):
        await copy.receive_piece(0, 0, sha256(b"x"), never())
    with pytest.raises(StagedError, match="there already, with other bytes"):
        copy.write_piece(0, 0, b"54321", sha256(b"54321"))
    assert read_data(copy) == [data]


# Wrong bytes


@pytest.mark.parametrize("wrong", [b"1234", b"123456", b"54321", b""], ids=["short", "long", "other", "empty"])
async def test_wrong_bytes_never_count(tmp_path: Path, wrong: bytes) -> None:
    copy, data = add_shards(open_copy(tmp_path), [shard(5)]), b"12345"
    with pytest.raises(StagedError, match="iece") as received:
        await copy.receive_piece(0, 0, sha256(data), in_parts(wrong, 2))
    with pytest.raises(StagedError, match="Piece 0 of shard 0") as written:
        copy.write_piece(0, 0, wrong, sha256(data))
    assert fault_of(received) is fault_of(written) is StagedFault.WRONG_BYTES
    assert copy.index.missing(9) == [(0, 0)]
    with pytest.raises(StagedError, match="1 of 1 pieces"):
        copy.seal()
    assert await copy.receive_piece(0, 0, sha256(data), in_parts(data, 2))
    copy.seal()
    assert read_data(copy) == [data]


async def test_a_source_that_breaks_off_leaves_the_piece_missing(tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"123"
        raise ConnectionResetError("gone")

    copy, data = add_shards(open_copy(tmp_path), [shard(5)]), b"12345"
    with pytest.raises(ConnectionResetError, match="gone"):
        await copy.receive_piece(0, 0, sha256(data), broken())
    assert await copy.receive_piece(0, 0, sha256(data), in_parts(data, 2))


async def test_a_cancelled_piece_writes_nothing_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    started, go, order = threading.Event(), threading.Event(), []
    write_at = files.write_at

    def slow(path: Path, offset: int, buffers: list[bytes]) -> int:
        started.set()
        assert go.wait(20)
        order.append("written")
        return write_at(path, offset, buffers)

    copy = add_shards(open_copy(tmp_path), [shard(5)])
    monkeypatch.setattr(files, "write_at", slow)
    task = asyncio.create_task(copy.receive_piece(0, 0, sha256(b"12345"), in_parts(b"12345", 5)))
    await asyncio.to_thread(started.wait, 20)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.01)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert order == ["written"]
    assert copy.index.missing(1) == [(0, 0)]


# Limits and space


def test_a_version_above_the_limit_is_refused_with_both_numbers(tmp_path: Path) -> None:
    copy = open_copy(tmp_path, limit=100)
    copy.add_shard(shard(60))
    with pytest.raises(
        StagedError, match=r"at least 101 bytes, more than the limit of 100 bytes \(spec.weights.staging.sizeLimit\)"
    ) as caught:
        copy.add_shard(shard(41))
    assert fault_of(caught) is StagedFault.TOO_LARGE
    copy.add_shard(shard(40))
    assert len(copy.index.shards) == 2


def test_a_version_that_does_not_fit_is_refused_before_its_bytes(tmp_path: Path) -> None:
    with pytest.raises(StagedError, match=r"The volume .* has \d+ bytes free, but the rest of the version needs \d+") as caught:
        open_copy(tmp_path, limit=2**62).add_shard(shard(2**61))
    assert fault_of(caught) is StagedFault.NO_SPACE


async def test_a_volume_that_is_full_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    copy, data = add_shards(open_copy(tmp_path), [shard(5)]), b"12345"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(StagedError, match=r"00000.safetensors cannot be written: No space left on device\.") as caught:
            await copy.receive_piece(0, 0, sha256(data), in_parts(data, 2))
        assert fault_of(caught) is StagedFault.NO_SPACE
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(StagedError, match="No space left"):
            await copy.allocate(0)
    assert await copy.receive_piece(0, 0, sha256(data), in_parts(data, 2))


@pytest.mark.parametrize("wrong", [shard(3, dtype="U7"), shard(-1), Shard(tensors=[*shard(1).tensors, *shard(1).tensors])])
def test_a_malformed_shard_creates_no_file(tmp_path: Path, wrong: Shard) -> None:
    copy = open_copy(tmp_path)
    with pytest.raises(StagedError):
        copy.add_shard(wrong)
    assert list(copy.folder.iterdir()) == []


# The map for process groups


async def test_bytes_in_the_file_are_confirmed_piece_by_piece(tmp_path: Path) -> None:
    copy, contents = open_copy(tmp_path), random_version(SHARDS)
    for number, each in enumerate(SHARDS):
        copy.add_shard(each)
        await copy.allocate(number)
        write_at(copy.shard_path(number), copy.data_start(number), [contents[number]])
        if number == 0:
            first = await copy.confirm_piece(0, 1)
            assert first == Piece(shard=0, piece=1, digest=sha256(pieces(contents[0])[1]))
        for piece in range(len(pieces(contents[number]))):
            await copy.confirm_piece(number, piece)
    copy.seal(VERSION)
    assert read_data(copy) == contents
    for number, piece in all_pieces(SHARDS):
        path, offset, size = copy.piece_location(number, piece)
        assert path.read_bytes()[offset : offset + size] == pieces(contents[number])[piece]


# Restart


def test_a_restart_keeps_complete_copies_with_ticket_and_version(tmp_path: Path) -> None:
    first, contents = copies(tmp_path), random_version(SHARDS)
    done = first.open(update_id(1), "secret", LIMIT)
    fill(done, SHARDS, contents).seal(VERSION)
    fill_shard(first.open(update_id(2), TICKET, LIMIT), SHARDS[0], contents[0])
    first.open(update_id(3), TICKET, LIMIT)
    (first.volume / "plugin").mkdir()
    second = copies(tmp_path)
    assert second.status() == [done.status()]
    kept = second.get(update_id(1))
    assert kept is not None
    assert (kept.ticket, kept.version, kept.index.end, kept.index.digests) == ("secret", VERSION, done.index.end, done.index.digests)
    assert kept.file_sizes == done.file_sizes
    assert read_data(kept) == contents
    assert {path.name for path in second.volume.iterdir()} == {update_id(1), "plugin"}


@pytest.mark.parametrize("fault", ["cut", "missing", "manifest", "end", "boot", "lies"])
def test_a_restart_deletes_what_it_cannot_trust(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = fill(open_copy(tmp_path), SHARDS, random_version(SHARDS))
    manifest = json.loads((copy.folder / MANIFEST).read_bytes())
    if fault == "cut":
        os.truncate(copy.shard_path(1), copy.file_sizes[1] - 1)
    elif fault == "missing":
        copy.shard_path(3).unlink()
    elif fault == "manifest":
        (copy.folder / MANIFEST).write_text('{"entries": [')
    elif fault == "end":
        (copy.folder / MANIFEST).write_text(json.dumps(manifest | {"entries": manifest["entries"][:-1]}))
    elif fault == "lies":
        manifest["entries"][-1]["end"]["digest"] = sha256(b"other")
        (copy.folder / MANIFEST).write_text(json.dumps(manifest))
    else:
        monkeypatch.setattr(staging, "read_boot_id", lambda: "another boot")
    again = copies(tmp_path)
    assert again.status() == []
    assert list(again.volume.iterdir()) == []
    again.open(copy.update, TICKET, LIMIT)


def test_a_copy_whose_ticket_is_lost_is_kept_and_not_served(tmp_path: Path) -> None:
    copy = fill(open_copy(tmp_path), SHARDS, random_version(SHARDS))
    (tmp_path / "state" / staging.TICKETS).write_text("{")
    again = copies(tmp_path).get(copy.update)
    assert again is not None
    assert again.ticket == ""


def test_only_the_owner_may_read_tickets_and_all_may_read_versions(tmp_path: Path) -> None:
    copy = fill(open_copy(tmp_path), SHARDS, random_version(SHARDS))
    assert stat.S_IMODE((tmp_path / "state" / staging.TICKETS).stat().st_mode) == 0o600
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in copy.folder.iterdir())
    assert TICKET not in (copy.folder / MANIFEST).read_text()


def test_a_version_may_become_known_after_the_end(tmp_path: Path) -> None:
    copy = fill(open_copy(tmp_path), SHARDS, random_version(SHARDS))
    end = copy.index.end
    assert copy.status().version is None
    assert copy.seal(VERSION) == copy.seal() == end
    assert copy.status().version == VERSION
    (restored,) = copies(tmp_path).status()
    assert restored.version == VERSION


# Open, keep, reset


async def test_copies_that_are_not_kept_are_deleted(tmp_path: Path) -> None:
    held = copies(tmp_path)
    opened = [held.open(update_id(number), TICKET, LIMIT) for number in range(3)]
    fill(opened[0], SHARDS, random_version(SHARDS))
    waiting = asyncio.create_task(opened[1].wait_for_entries(0, 60))
    await asyncio.sleep(0)
    await held.keep({update_id(2)})
    await asyncio.wait_for(waiting, 20)
    assert [each.update for each in held.status()] == [update_id(2)]
    assert [path.name for path in held.volume.iterdir()] == [update_id(2)]
    with pytest.raises(StagedError, match="has been deleted meanwhile") as caught:
        opened[1].add_shard(shard(1))
    assert fault_of(caught) is StagedFault.DELETED
    with pytest.raises(StagedError, match="deleted"):
        opened[0].seal()
    assert held.open(update_id(1), TICKET, LIMIT) is not opened[1]


async def test_a_full_state_volume_leaves_no_deleted_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(tmp_path / "volume", tmp_path / "state")
    shards = [shard(100)]
    fill(copies.open(update_id(1), TICKET, LIMIT), shards, random_version(shards))

    def is_full(*_: object, **__: object) -> None:
        raise StagedError("The volume is full.", StagedFault.NO_SPACE)

    monkeypatch.setattr("sglang_rollout.staging.copies.replace_file", is_full)
    with pytest.raises(StagedError):
        await copies.keep(set())
    assert list((tmp_path / "volume").iterdir()) == []


def test_opening_again_continues_with_the_new_ticket(tmp_path: Path) -> None:
    held = copies(tmp_path)
    copy = held.open(update_id(), "old", 1)
    assert held.open(update_id(), "new", 2) is copy
    assert (copy.ticket, copy.size_limit) == ("new", 2)
    for wrong in ("../" + update_id(), update_id() + "\n", ""):
        with pytest.raises(StagedError, match="not the ID of an update"):
            held.open(wrong, TICKET, LIMIT)


async def test_a_reset_copy_starts_from_nothing(tmp_path: Path) -> None:
    copy = fill(open_copy(tmp_path), SHARDS, random_version(SHARDS))
    with copy.shard_path(0).open("rb") as reader:
        await copy.reset()
        assert len(reader.read()) > PIECE
    assert (copy.index.entries, copy.is_complete, list(copy.folder.iterdir())) == ([], False, [])
    other = random_version(SHARDS)
    fill(copy, SHARDS, other)
    assert read_data(copy) == other


async def test_files_of_a_deleted_copy_are_not_called_a_full_volume(tmp_path: Path) -> None:
    held = copies(tmp_path)
    copy = add_shards(held.open(update_id(), TICKET, LIMIT), [shard(5)])

    async def late() -> AsyncIterator[bytes]:
        await held.keep(set())
        yield b"12345"

    for call in (copy.receive_piece(0, 0, sha256(b"12345"), late()), copy.confirm_piece(0, 0)):
        with pytest.raises(StagedError, match="deleted meanwhile"):
            await call


async def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    copy = add_shards(open_copy(tmp_path), [shard(5), shard(6)])
    copy.shard_path(0).unlink()
    os.truncate(copy.shard_path(1), copy.data_start(1) + 5)
    with pytest.raises(StagedError, match=r"00000.safetensors cannot be read: No such file or directory\."):
        await copy.confirm_piece(0, 0)
    with pytest.raises(StagedError, match=r"00001.safetensors is too short\."):
        await copy.confirm_piece(1, 0)


async def test_a_piece_of_before_a_reset_is_refused(tmp_path: Path) -> None:
    copy, data = add_shards(open_copy(tmp_path), [shard(5)]), b"12345"

    async def late() -> AsyncIterator[bytes]:
        await copy.reset()
        copy.add_shard(shard(5))
        yield data

    with pytest.raises(StagedError, match="started again meanwhile"):
        await copy.receive_piece(0, 0, sha256(data), late())
    assert copy.index.missing(1) == [(0, 0)]


# Follow


async def test_waiting_for_entries(tmp_path: Path) -> None:
    copy = open_copy(tmp_path)
    await copy.wait_for_entries(0, 0)
    waiting = asyncio.create_task(copy.wait_for_entries(1, 60))
    copy.add_shard(shard(5))
    await asyncio.sleep(0)
    assert not waiting.done()
    copy.write_piece(0, 0, b"12345", sha256(b"12345"))
    await asyncio.wait_for(waiting, 20)
    end = copy.seal()
    await asyncio.wait_for(copy.wait_for_entries(2, 60), 20)
    waiting = asyncio.create_task(copy.wait_for_entries(3, 60))
    await asyncio.sleep(0)
    await copy.reset()
    await asyncio.wait_for(waiting, 20)
    fill_shard(copy, shard(5), b"12345")
    copy.seal()
    assert copy.index.entries[-1] == IndexEntry(end=VersionEnd(digest=end.digest, bytes=5))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StagedError, match="file/volume cannot be written: Not a directory"):
        Copies(tmp_path / "file/volume", tmp_path / "state")
