"""Pieces that move with Mooncake Transfer Engine: the same copies as over HTTP, and HTTP after every error.

The tests run with a stand-in for the library, which reads the memory of other processes, and with the library itself if it is installed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest
import uvloop
from aiohttp import web

from sglang_rollout.staging import mooncake
from sglang_rollout.staging import pull as pulling
from sglang_rollout.staging.copies import DIFFERENCES
from sglang_rollout.staging.differences import encode
from sglang_rollout.staging.index import StagedError
from sglang_rollout.staging.mooncake import MooncakeProcess, MooncakeReader, mooncake_readers
from sglang_rollout.staging.piece_reader import PieceReader
from sglang_rollout.wire.ports import BASE_HEADER
from tests.contract.support.staging_pods import (
    SHARDS,
    Handler,
    Pod,
    has_mooncake,
    mooncake_processes,
    pull_with_mooncake,
    run_pod,
    stage_request,
    until,
    use_rdma,
)
from tests.support.staged import (
    LIMIT,
    PIECE,
    TICKET,
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

pytestmark = pytest.mark.usefixtures("over_tcp")
PIECES = 7


# Both readers give the same copy


@pytest.mark.parametrize("reader", [PieceReader, MooncakeReader])
@pytest.mark.usefixtures("library")
async def test_a_version_is_copied_while_it_arrives(
    pods: list[Pod], tmp_path: Path, data: list[bytes], reader: type[PieceReader], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    peer, store = pods
    last = open_copy(tmp_path)
    calls = [pull_with_mooncake(peer.copy, stage_request([store]), reader), pull_with_mooncake(last, stage_request([peer, store]), reader)]
    tasks = [asyncio.create_task(call) for call in calls]
    store_copy = store.copy
    for number, each in enumerate(SHARDS):
        store_copy.add_shard(each)
        for piece in reversed(range(len(pieces(data[number])))):
            held = pieces(data[number])[piece]
            store_copy.write_piece(number, piece, held, sha256(held))
            await until(lambda key=(number, piece): key in last.index.digests)  # type: ignore[misc]
    end = store_copy.seal()
    assert await asyncio.gather(*tasks) == [end, end]
    assert read_data(last) == read_data(peer.copy) == data
    over_http = PIECES if reader is PieceReader else 0
    assert (peer.pieces_given, store.pieces_given) == (over_http, over_http)
    lines = [line for line in caplog.messages if "with Mooncake over tcp" in line]
    expected = [f"{end.bytes} bytes came from 127.0.0.1:{pod.url.rpartition(':')[2]} with Mooncake over tcp." for pod in pods]
    assert sorted(lines) == (sorted(expected) if reader is MooncakeReader else [])


@pytest.mark.usefixtures("library")
async def test_pieces_may_grow(pods: list[Pod], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that reads uses its buffers again, and ends the registration of one that is too small."""
    monkeypatch.setattr(pulling, "PARALLEL_PIECES", 1)
    use_small_pieces(monkeypatch, 2**20)
    store, shards = pods[1], [shard(2**size) for size in (3, 14, 16, 18, 20, 4)]
    data, copy = random_version(shards), open_copy(tmp_path)
    end = store.hold(shards, data)
    assert await pull_with_mooncake(copy, stage_request([store])) == end
    assert (read_data(copy), store.pieces_given) == (data, 0)
    for registry in tmp_path.glob("stand-in-mooncake-*.json"):
        if registry.stem.rpartition("-")[2] != store.sharing.segment.rpartition(":")[2]:
            assert list(json.loads(registry.read_text()).values()) == [2**20]


@pytest.mark.parametrize("is_damaged", [False, True])
@pytest.mark.usefixtures("library")
async def test_a_piece_comes_over_http_only_as_its_difference(tmp_path: Path, data: list[bytes], is_damaged: bool) -> None:
    """A pod that has the version before asks for the difference of each piece; without one, or with a wrong one, the piece is whole."""
    whole: list[str] = []

    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        answer = await handler(request)
        if "/pieces/" in request.path and answer.status == 200 and BASE_HEADER not in answer.headers:
            whole.append(request.path)
        return answer

    changed = bytes([data[0][3 * PIECE] ^ 1])
    new = [bytes(PIECE) + data[0][PIECE : 3 * PIECE] + changed + data[0][3 * PIECE + 1 :], *data[1:]]
    replaced, patched = pieces(new[0])[0], pieces(new[0])[3]
    difference = encode(pieces(data[0])[3], patched)
    assert difference
    async with run_pod(tmp_path / "store", note, mooncake=True) as store:
        held, theirs = copies(tmp_path / "mine"), fill(store.copies.open(update_id(1), TICKET, LIMIT), SHARDS, data)
        base, copy = fill(held.open(update_id(1), TICKET, LIMIT), SHARDS, data), held.open(update_id(), TICKET, LIMIT)
        for number, each in enumerate(SHARDS):
            store.copy.add_shard(each)
            for piece, now in enumerate(pieces(new[number])):
                if now != patched:
                    store.copy.write_piece(number, piece, now, sha256(now))
        await store.copy.patch_piece(0, 3, sha256(patched), theirs, difference)
        end = store.copy.seal()
        if is_damaged:
            next((store.copy.folder / DIFFERENCES).iterdir()).write_bytes(bytes(len(difference)))
        assert await pull_with_mooncake(copy, stage_request([store]), base=base) == end
    assert (read_data(copy), whole) == (new, [])
    assert copy.bytes_received == len(replaced) + len(difference) + (len(patched) if is_damaged else 0)


# Errors of Mooncake


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("initialize", "Mooncake could not start with tcp at 127.0.0.1"),
        ("crash", "The process of Mooncake ended when it should read."),
        ("wrong", "has other bytes than announced"),
        ("hang", "Mooncake did not read within 0.5 s."),
    ],
)
async def test_after_an_error_the_pieces_come_over_http(
    pods: list[Pod],
    tmp_path: Path,
    data: list[bytes],
    faults: Path,
    fault: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(mooncake, "_CALL_SECONDS", 0.5)
    store, copy = pods[1], open_copy(tmp_path)
    end = store.hold(SHARDS, data)
    (faults / fault).touch()
    with caplog.at_level(logging.WARNING):
        assert await pull_with_mooncake(copy, stage_request([store])) == end
    assert (read_data(copy), store.pieces_given) == (data, PIECES)
    lines = [line for line in caplog.messages if "over HTTP and not with Mooncake" in line]
    assert len(lines) == 1
    assert reason in lines[0]


async def test_a_machine_without_the_library_uses_http(
    pods: list[Pod], tmp_path: Path, data: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    if has_mooncake():
        pytest.skip("Mooncake Transfer Engine is installed")
    store = pods[1]
    end = store.hold(SHARDS, data)
    assert await pull_with_mooncake(open_copy(tmp_path), stage_request([store])) == end
    assert store.pieces_given == PIECES
    assert "No module named 'mooncake'" in caplog.text


@pytest.mark.usefixtures("faults")
async def test_pods_without_a_device_for_rdma_use_http(
    pods: list[Pod], tmp_path: Path, data: list[bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("MC_FORCE_TCP")
    monkeypatch.setattr(mooncake, "_DEVICES", tmp_path / "none")
    store = pods[1]
    end = store.hold(SHARDS, data)
    assert await pull_with_mooncake(open_copy(tmp_path), stage_request([store])) == end
    assert store.pieces_given == PIECES
    assert "no device for RDMA" in caplog.text


@pytest.mark.usefixtures("faults")
async def test_a_parent_without_mooncake_sends_over_http(tmp_path: Path, data: list[bytes]) -> None:
    async with run_pod(tmp_path / "store") as store:
        end = store.hold(SHARDS, data)
        assert await pull_with_mooncake(open_copy(tmp_path), stage_request([store])) == end
        assert store.pieces_given == PIECES


async def test_a_parent_with_another_transport_sends_over_http(
    pods: list[Pod], tmp_path: Path, data: list[bytes], faults: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, transports = pods[1], iter(["rdma", "tcp"])
    end = store.hold(SHARDS, data)
    (faults / "rdma").touch()
    monkeypatch.setattr(mooncake, "find_transport", lambda: next(transports))
    assert await pull_with_mooncake(open_copy(tmp_path), stage_request([store])) == end
    assert store.pieces_given == PIECES
    assert "The other pod uses rdma, and this one tcp." in caplog.text


@pytest.mark.usefixtures("library")
async def test_rdma_is_not_replaced_by_tcp(
    pods: list[Pod], tmp_path: Path, data: list[bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Mooncake uses TCP if it cannot use the device, for example without the library of its vendor. The maps would be writable."""
    if any(Path("/sys/class/infiniband").glob("*")):
        pytest.skip("this machine has a device for RDMA")
    use_rdma(monkeypatch, tmp_path)
    store = pods[1]
    end = store.hold(SHARDS, data)
    assert await pull_with_mooncake(open_copy(tmp_path), stage_request([store])) == end
    assert store.pieces_given == PIECES
    assert "Mooncake could not start with rdma at 127.0.0.1" in caplog.text


async def test_mooncake_for_efa_is_refused(
    pods: list[Pod], tmp_path: Path, data: list[bytes], faults: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("rdma", "efa"):
        (faults / name).touch()
    use_rdma(monkeypatch, tmp_path)
    store = pods[1]
    end = store.hold(SHARDS, data)
    assert await pull_with_mooncake(open_copy(tmp_path), stage_request([store])) == end
    assert store.pieces_given == PIECES
    assert "This build of Mooncake is for EFA" in caplog.text


async def test_a_cancelled_copy_leaves_no_process(pods: list[Pod], tmp_path: Path, data: list[bytes], faults: Path) -> None:
    """A process that continues would write into a file that another parent fills meanwhile."""
    store, copy = pods[1], open_copy(tmp_path)
    end = store.hold(SHARDS, data)
    (faults / "hang").touch()
    task = asyncio.create_task(pull_with_mooncake(copy, stage_request([store])))
    await until(lambda: mooncake_processes(tmp_path) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (faults / "hang").unlink()
    assert await pull_with_mooncake(copy, stage_request([store])) == end
    assert (read_data(copy), store.pieces_given) == (data, 0)


async def test_wrong_bytes_of_the_parent_itself_are_refused(pods: list[Pod], tmp_path: Path, faults: Path) -> None:
    """Mooncake reads them, HTTP reads them again, and then the parent is given up."""
    del faults
    peer = pods[0]
    added = shard(PIECE)
    fill_shard(peer.copy, added, random_version([added])[0])
    peer.copy.seal()
    peer.copy.shard_path(0).write_bytes(bytes(peer.copy.file_sizes[0]))
    with pytest.raises(StagedError, match="No parent gives the right bytes"):
        await pull_with_mooncake(open_copy(tmp_path), stage_request([peer]))


async def test_a_parent_that_failed_is_read_over_http_for_some_time(
    pods: list[Pod], tmp_path: Path, data: list[bytes], faults: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each version waits again for the same parent."""
    monkeypatch.setattr(mooncake, "_CALL_SECONDS", 0.5)
    monkeypatch.setattr(mooncake, "_COSTLY_SECONDS", 0.3)
    store, readers = pods[1], mooncake_readers()
    store.hold(SHARDS, data)
    (faults / "hang").touch()
    await pull_with_mooncake(open_copy(tmp_path / "1"), stage_request([store]), readers)
    (faults / "hang").unlink()
    store.asked.clear()
    await pull_with_mooncake(open_copy(tmp_path / "2"), stage_request([store]), readers)
    assert (store.pieces_given, any("/memory/" in path for path in store.asked)) == (PIECES, False)
    monkeypatch.setattr(mooncake, "_RETRY_SECONDS", 0.0)
    store.asked.clear()
    await pull_with_mooncake(open_copy(tmp_path / "3"), stage_request([store]), readers)
    assert store.pieces_given == 0


async def test_a_failure_that_takes_no_time_is_not_remembered(
    pods: list[Pod], tmp_path: Path, data: list[bytes], faults: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parent that deletes a version meanwhile has no such failure with the next version."""
    monkeypatch.setattr(mooncake, "_COSTLY_SECONDS", 20.0)
    store, readers = pods[1], mooncake_readers()
    store.hold(SHARDS, data)
    (faults / "crash").touch()
    await pull_with_mooncake(open_copy(tmp_path / "1"), stage_request([store]), readers)
    (faults / "crash").unlink()
    store.asked.clear()
    await pull_with_mooncake(open_copy(tmp_path / "2"), stage_request([store]), readers)
    assert store.pieces_given == 0


@pytest.mark.usefixtures("faults")
async def test_a_parent_has_time_to_start_mooncake(tmp_path: Path, data: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "_FIRST_SILENCE_SECONDS", 0.2)

    async def start_slowly(request: web.Request, handler: Handler) -> web.StreamResponse:
        if "/memory/" in request.path:
            await asyncio.sleep(0.5)
        return await handler(request)

    async with run_pod(tmp_path / "store", start_slowly, mooncake=True) as store:
        end = store.hold(SHARDS, data)
        assert await pull_with_mooncake(open_copy(tmp_path), stage_request([store])) == end
        assert store.pieces_given == 0


def test_a_crash_while_another_piece_waits_for_its_parent(tmp_path: Path, faults: Path) -> None:
    """Agents run with uvloop, below which a write to a process that has ended raises another error."""
    shards = [shard(PIECE), shard(PIECE)]
    data = random_version(shards)

    async def copy_version() -> None:
        async def hold_second(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.path.endswith("/memory/1"):
                await until(lambda: store.pieces_given == 1)  # the first piece, over HTTP
            return await handler(request)

        async with run_pod(tmp_path / "store", hold_second, mooncake=True) as store:
            end, copy = store.hold(shards, data), open_copy(tmp_path)
            assert await pull_with_mooncake(copy, stage_request([store])) == end
            assert (read_data(copy), store.pieces_given) == (data, 2)
            assert any("/memory/1" in path for path in store.asked)

    (faults / "crash").touch()
    uvloop.run(copy_version())


@pytest.mark.usefixtures("faults")
async def test_a_process_that_does_not_end_holds_up_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The kernel ends a process in a call of a driver only after this call."""
    monkeypatch.setattr(mooncake, "_KILL_SECONDS", 0.1)
    child = await MooncakeProcess.start("127.0.0.1")
    with monkeypatch.context() as patch:
        patch.setattr(type(child._process), "kill", lambda _: None)
        async with asyncio.timeout(5):
            await child.kill()
    assert not child.is_alive
    assert "has not ended" in caplog.text
    child._process.kill()
    await child._process.wait()


@pytest.mark.usefixtures("faults")
async def test_a_parent_that_names_a_host_is_not_followed(tmp_path: Path, data: list[bytes], caplog: pytest.LogCaptureFixture) -> None:
    async def located(request: web.Request, handler: Handler) -> web.StreamResponse:
        if "/memory/" not in request.path:
            return await handler(request)
        return web.json_response({"segment": "metadata.internal:80", "transport": "tcp", "address": 1})

    async with run_pod(tmp_path / "store", located) as store:
        end = store.hold(SHARDS, data)
        assert await pull_with_mooncake(open_copy(tmp_path), stage_request([store])) == end
        assert store.pieces_given == PIECES
    assert "'metadata.internal:80' in place of an IP address" in caplog.text
