"""Copying a version over HTTP while it arrives, from parents that fail in every way."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import web

from sglang_rollout.staging import pull as pulling
from sglang_rollout.staging.index import StagedError, StagedFault
from sglang_rollout.wire.staged import IndexEntry, IndexReply, Shard, VersionEnd
from sglang_rollout.wire.states import Version
from tests.contract.support.staging_pods import SECONDS, SHARDS, Fault, Handler, Pod, pull_into, run_pod, stage_request, until
from tests.support.staged import LIMIT, PIECE, TICKET, copies, open_copy, pieces, random_version, read_data, sha256, shard, update_id
from tests.support.staged import use_small_pieces as set_small_pieces

PIECES = 7


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    set_small_pieces(monkeypatch)
    monkeypatch.setattr(pulling, "PATIENCE_SECONDS", 0.2)


@pytest.fixture
async def pods(tmp_path: Path) -> AsyncIterator[list[Pod]]:
    """A peer, and the store."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(run_pod(tmp_path / name)) for name in ("peer", "store")]


@pytest.fixture
def data() -> list[bytes]:
    return random_version(SHARDS)


def add_piece(pod: Pod, data: Sequence[bytes], number: int, piece: int) -> None:
    held = pieces(data[number])[piece]
    pod.copy.write_piece(number, piece, held, sha256(held))


def on_pieces(answer: Handler) -> Fault:
    """Return a fault that replaces the answers of pieces."""

    async def fault(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await (answer(request) if "/pieces/" in request.path else handler(request))

    return fault


# While the version arrives


async def test_a_version_passes_through_a_chain_while_it_arrives(pods: list[Pod], tmp_path: Path, data: list[bytes]) -> None:
    """Each piece reaches the end of the chain before the next piece exists."""
    peer, store = pods
    last = open_copy(tmp_path)
    calls = [pull_into(peer.copy, stage_request([store])), pull_into(last, stage_request([peer, store]))]
    store_copy = store.copy
    tasks = [asyncio.create_task(call) for call in calls]
    for number, each in enumerate(SHARDS):
        store_copy.add_shard(each)
        for piece in reversed(range(len(pieces(data[number])))):
            add_piece(store, data, number, piece)
            await until(lambda key=(number, piece): key in last.index.digests)  # type: ignore[misc]
    await until(lambda: len(last.index.shards) == len(SHARDS))
    assert not any(task.done() for task in tasks)
    end = store_copy.seal()
    assert await asyncio.gather(*tasks) == [end, end]
    assert read_data(last) == read_data(peer.copy) == data
    assert (peer.pieces_given, store.pieces_given) == (PIECES, PIECES)


async def test_a_complete_copy_asks_no_parent(pods: list[Pod], tmp_path: Path, data: list[bytes]) -> None:
    end, copy = pods[1].hold(SHARDS, data), open_copy(tmp_path)
    await pull_into(copy, stage_request([pods[1]]))
    version, asked = Version(run=1, step=3, label="3"), len(pods[1].asked)
    request = stage_request(["http://127.0.0.1:9"], digest=end.digest).model_copy(update={"version": version})
    assert await pull_into(copy, request) == end
    assert (copy.status().version, len(pods[1].asked)) == (version, asked)
    assert copies(tmp_path).status() == [copy.status().model_copy(update={"transferred": 0, "received": 0})], (
        "another process was sent nothing"
    )


async def test_a_parent_may_learn_of_the_update_a_little_later(pods: list[Pod], tmp_path: Path, data: list[bytes]) -> None:
    peer, store = pods
    end = store.hold(SHARDS, data)
    task = asyncio.create_task(pull_into(open_copy(tmp_path), stage_request([peer, store])))
    await until(lambda: bool(peer.asked))
    peer.hold(SHARDS, data)
    assert await task == end
    assert (peer.pieces_given, store.pieces_given) == (PIECES, 0)


async def test_a_parent_that_never_learns_of_it_is_replaced(
    pods: list[Pod], tmp_path: Path, data: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    end = pods[1].hold(SHARDS, data)
    with caplog.at_level("INFO"):
        assert await pull_into(open_copy(tmp_path), stage_request(pods)) == end
    assert f"is complete: {end.bytes} bytes ({end.bytes} from {pods[1].url})." in caplog.text


async def test_a_cancelled_pull_continues_from_another_parent(pods: list[Pod], tmp_path: Path, data: list[bytes]) -> None:
    peer, store = pods
    for each in SHARDS:
        peer.copy.add_shard(each)
    for piece in (1, 3):
        add_piece(peer, data, 0, piece)
    copy = open_copy(tmp_path)
    task = asyncio.create_task(pull_into(copy, stage_request([peer])))
    await until(lambda: len(copy.index.digests) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    end = store.hold(SHARDS, data)
    assert await pull_into(copy, stage_request([store])) == end
    assert store.pieces_given == PIECES - 2
    assert read_data(copy) == data


async def test_a_cancelled_pull_does_not_wait_for_a_silent_parent(
    pods: list[Pod], tmp_path: Path, data: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "_FIRST_SILENCE_SECONDS", 10 * SECONDS)
    copy, asked = open_copy(tmp_path), asyncio.Event()

    async def stall(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Length": str(PIECE)})
        await answer.prepare(request)
        await answer.write(b"x")
        asked.set()
        await asyncio.sleep(10 * SECONDS)
        return answer

    pods[0].hold(SHARDS, data)
    pods[0].fault = on_pieces(stall)
    task = asyncio.create_task(pull_into(copy, stage_request([pods[0]])))
    async with asyncio.timeout(SECONDS):
        await asked.wait()
    task.cancel()
    async with asyncio.timeout(SECONDS):
        with pytest.raises(asyncio.CancelledError):
            await task
    await until(lambda: not any(thread.name.startswith("pieces") for thread in threading.enumerate()))


async def test_a_parent_that_has_closed_an_idle_connection_is_asked_again(
    pods: list[Pod], tmp_path: Path, data: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent closes each connection after its answer, and the piece comes over another one."""
    end = pods[1].hold(SHARDS, data)
    monkeypatch.setattr(pulling, "PARALLEL_PIECES", 1)

    async def close_after(request: web.Request, handler: Handler) -> web.StreamResponse:
        answer = await handler(request)
        transport = request.transport
        assert transport is not None
        asyncio.get_running_loop().call_soon(transport.close)
        return answer

    pods[1].fault = close_after
    copy = open_copy(tmp_path)
    assert await pull_into(copy, stage_request([pods[1]])) == end
    assert read_data(copy) == data
    assert sum(path.endswith("/index") for path in pods[1].asked) == 1  # the parent was not given up in between


# Parents that fail


async def test_a_dead_parent_is_replaced(pods: list[Pod], tmp_path: Path, data: list[bytes]) -> None:
    peer, store = pods
    end = store.hold(SHARDS, data)
    await peer.stop()
    assert await pull_into(open_copy(tmp_path), stage_request([peer, store], digest=end.digest)) == end


async def test_a_parent_that_dies_between_is_replaced_and_its_pieces_stay(pods: list[Pod], tmp_path: Path, data: list[bytes]) -> None:
    peer, store = pods
    for each in SHARDS:
        peer.copy.add_shard(each)
    for piece in (0, 4):
        add_piece(peer, data, 0, piece)
    end, copy = store.hold(SHARDS, data), open_copy(tmp_path)
    task = asyncio.create_task(pull_into(copy, stage_request(pods, digest=end.digest)))
    await until(lambda: len(copy.index.digests) == 2)
    await peer.stop()
    assert await task == end
    assert (store.pieces_given, read_data(copy)) == (PIECES - 2, data)


async def test_a_parent_without_news_is_replaced_if_the_store_has_some(
    pods: list[Pod], tmp_path: Path, data: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "POLL_SECONDS", 0.1)
    peer, store = pods
    peer.copy.add_shard(SHARDS[0])
    store.copy.add_shard(SHARDS[0])
    copy = open_copy(tmp_path)
    task = asyncio.create_task(pull_into(copy, stage_request(pods)))
    await until(lambda: len(peer.asked) >= 3)
    assert not any("/pieces/" in path for path in store.asked)
    store.copy.write_piece(0, 0, pieces(data[0])[0], sha256(pieces(data[0])[0]))
    await until(lambda: len(copy.index.digests) == 1)
    task.cancel()


async def test_a_parent_that_receives_slowly_is_kept(
    pods: list[Pod], tmp_path: Path, data: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a slow network a piece takes longer than a question for new entries."""
    monkeypatch.setattr(pulling, "POLL_SECONDS", 0.1)
    peer, store = pods
    peer.copy.add_shard(SHARDS[0])
    store.hold(SHARDS, data)
    task = asyncio.create_task(pull_into(open_copy(tmp_path), stage_request(pods)))
    for _ in range(20):
        peer.copy.note_bytes(1)
        await asyncio.sleep(0.02)
    assert not store.pieces_given
    await until(lambda: store.pieces_given > 0)  # the parent receives no more
    task.cancel()


async def test_a_parent_whose_own_copy_fails_is_replaced_at_once(
    pods: list[Pod], tmp_path: Path, data: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader takes the pieces that the parent has, and then asks the next one. A parent that starts again is asked like any other."""
    monkeypatch.setattr(pulling, "POLL_SECONDS", 25.0)
    peer, store = pods
    for each in SHARDS:
        peer.copy.add_shard(each)
    add_piece(peer, data, 0, 0)
    copy = open_copy(tmp_path)
    task = asyncio.create_task(pull_into(copy, stage_request(pods, deadline=10)))
    await until(lambda: len(copy.index.digests) == 1)
    end = store.hold(SHARDS, data)
    with pytest.raises(StagedError, match="not complete after"):
        await pull_into(peer.copy, stage_request(["http://127.0.0.1:9"], deadline=0.1))
    assert await task == end
    assert (peer.pieces_given, store.pieces_given, read_data(copy)) == (1, PIECES - 1, data)
    assert await pull_into(peer.copy, stage_request([store])) == end
    store.asked.clear()
    assert await pull_into(open_copy(tmp_path / "later"), stage_request(pods)) == end
    assert store.asked == []


async def test_a_parent_that_stops_sending_is_replaced(
    pods: list[Pod], tmp_path: Path, data: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stall(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = PIECE
        await response.prepare(request)
        await response.write(b"x")
        await asyncio.sleep(SECONDS)
        return response

    monkeypatch.setattr(pulling, "_FIRST_SILENCE_SECONDS", 0.3)
    peer, store = pods
    end = peer.hold(SHARDS, data)
    store.hold(SHARDS, data)
    peer.fault = on_pieces(stall)
    copy = open_copy(tmp_path)
    assert await pull_into(copy, stage_request(pods)) == end
    assert read_data(copy) == data


async def test_a_parent_that_answers_nothing_is_replaced(
    pods: list[Pod], tmp_path: Path, data: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel accepts connections for a stopped process."""

    async def hang(_: web.Request, __: Handler) -> web.StreamResponse:
        await asyncio.sleep(SECONDS)
        return web.Response()

    monkeypatch.setattr(pulling, "POLL_SECONDS", 25.0)
    monkeypatch.setattr(pulling, "_FIRST_SILENCE_SECONDS", 0.2)
    peer, store = pods
    peer.fault = hang
    end, copy = store.hold(SHARDS, data), open_copy(tmp_path)
    assert await pull_into(copy, stage_request(pods, deadline=15)) == end
    assert len(peer.asked) == 1


async def test_the_only_parent_gets_more_time_in_each_round(
    pods: list[Pod], tmp_path: Path, data: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parent on a slow machine needs longer for its first byte than the first round allows."""

    async def late(request: web.Request, handler: Handler) -> web.StreamResponse:
        if "/pieces/" in request.path:
            await asyncio.sleep(0.5)
        return await handler(request)

    monkeypatch.setattr(pulling, "_FIRST_SILENCE_SECONDS", 0.2)
    store = pods[1]
    store.fault = late
    end, copy = store.hold(SHARDS, data), open_copy(tmp_path)
    assert await pull_into(copy, stage_request([store])) == end


async def test_truncated_answers_never_count(pods: list[Pod], tmp_path: Path, data: list[bytes]) -> None:
    async def truncated(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = PIECE
        await response.prepare(request)
        await response.write(b"x" * 10)
        assert request.transport is not None
        request.transport.close()
        return response

    peer, store = pods
    end = peer.hold(SHARDS, data)
    store.hold(SHARDS, data)
    peer.fault = on_pieces(truncated)
    copy = open_copy(tmp_path)
    assert await pull_into(copy, stage_request(pods)) == end
    assert read_data(copy) == data


@pytest.mark.parametrize("body", [b"", b"x" * 10, b"x" * PIECE, b"x" * 5 * PIECE], ids=["empty", "short", "other", "long"])
async def test_a_parent_with_wrong_bytes_is_not_asked_again(pods: list[Pod], tmp_path: Path, data: list[bytes], body: bytes) -> None:
    async def wrong(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body)

    peer, store = pods
    peer.hold(SHARDS, data)
    peer.fault = on_pieces(wrong)
    copy = open_copy(tmp_path)
    task = asyncio.create_task(pull_into(copy, stage_request(pods)))
    await until(lambda: any("/index" in path for path in store.asked))
    asked = len(peer.asked)
    await asyncio.sleep(0.5)  # the store does not know the update, so the parents are asked in turn
    assert copy.index.digests == {}
    end = store.hold(SHARDS, data)
    assert await task == end
    assert (len(peer.asked), read_data(copy)) == (asked, data)


async def test_wrong_bytes_from_every_parent_end_the_pull(pods: list[Pod], tmp_path: Path, data: list[bytes]) -> None:
    async def wrong(_: web.Request) -> web.StreamResponse:
        return web.Response(body=b"x" * PIECE)

    for pod in pods:
        pod.hold(SHARDS, data)
        pod.fault = on_pieces(wrong)
    with pytest.raises(StagedError, match=r"No parent gives the right bytes of update 0+") as caught:
        await pull_into(open_copy(tmp_path), stage_request(pods))
    assert caught.value.fault is StagedFault.WRONG_DIGEST
    assert all(pod.url in str(caught.value) for pod in pods)


# Parents that lie


def other_version(data: list[bytes]) -> list[bytes]:
    return [bytes(byte ^ 1 for byte in part) for part in data]


async def test_a_lie_with_a_demanded_digest_is_found_before_its_bytes(pods: list[Pod], tmp_path: Path, data: list[bytes]) -> None:
    peer, store = pods
    peer.hold(SHARDS, other_version(data))
    end, copy = store.hold(SHARDS, data), open_copy(tmp_path)
    assert await pull_into(copy, stage_request(pods, digest=end.digest)) == end
    assert read_data(copy) == data


async def test_a_lie_is_found_when_the_digest_becomes_known(pods: list[Pod], tmp_path: Path, data: list[bytes]) -> None:
    peer, store = pods
    lie = peer.hold(SHARDS, other_version(data))
    end, copy = store.hold(SHARDS, data), open_copy(tmp_path)
    assert await pull_into(copy, stage_request(pods)) == lie
    assert await pull_into(copy, stage_request(pods, digest=end.digest)) == end
    assert read_data(copy) == data


@pytest.mark.parametrize("lie", ["piece", "shard", "more shards"])
async def test_the_store_decides_where_parents_contradict_each_other(pods: list[Pod], tmp_path: Path, data: list[bytes], lie: str) -> None:
    """A peer lies and then dies, so that only the store's index shows the lie."""
    peer, store = pods
    announced = [shard(9), *SHARDS[1:]] if lie == "shard" else [*SHARDS, shard(0)] if lie == "more shards" else SHARDS
    for each in announced:
        peer.copy.add_shard(each)
    first = b"x" * 9 if lie == "shard" else pieces(data[0])[0] if lie == "more shards" else b"x" * PIECE
    peer.copy.write_piece(0, 0, first, sha256(first))
    end, copy = store.hold(SHARDS, data), open_copy(tmp_path)
    task = asyncio.create_task(pull_into(copy, stage_request(pods)))
    await until(lambda: len(copy.index.digests) == 1)
    await peer.stop()
    assert await task == end
    assert read_data(copy) == data
    assert {path.name for path in copy.folder.parent.iterdir()} == {copy.update}


@pytest.mark.parametrize(
    "entries",
    [
        [IndexEntry()],
        [IndexEntry(end=VersionEnd(digest="0" * 64, bytes=1))],
        [IndexEntry(shard=SHARDS[0]), IndexEntry(end=VersionEnd(digest="0" * 64, bytes=1))],
        [IndexEntry(shard=shard(1, dtype="U7"))],
        [IndexEntry(shard=shard(2**61))],
        [IndexEntry(shard=shard(LIMIT + 1))],
        None,
    ],
    ids=["nothing", "only an end", "an early end", "type", "space", "limit", "no JSON"],
)
async def test_a_parent_with_a_senseless_index_is_replaced(
    pods: list[Pod], tmp_path: Path, data: list[bytes], entries: list[IndexEntry] | None
) -> None:
    async def senseless(_: web.Request, __: Handler) -> web.StreamResponse:
        text = "[" if entries is None else IndexReply(entries=entries, next=len(entries)).model_dump_json(exclude_none=True)
        return web.Response(text=text)

    peer, store = pods
    peer.fault = senseless
    end, copy = store.hold(SHARDS, data), open_copy(tmp_path)
    assert await pull_into(copy, stage_request(pods, digest=end.digest)) == end
    assert read_data(copy) == data


async def test_a_parent_that_started_again_is_read_again(pods: list[Pod], tmp_path: Path, data: list[bytes]) -> None:
    _, store = pods
    for each in SHARDS:
        store.copy.add_shard(each)
    add_piece(store, data, 0, 0)
    copy = open_copy(tmp_path)
    task = asyncio.create_task(pull_into(copy, stage_request([store])))
    await until(lambda: len(copy.index.digests) == 1)
    await store.copy.reset()
    other = other_version(data)
    end = store.hold(SHARDS, other)
    assert await task == end
    assert read_data(copy) == other


# Limits


async def test_a_version_above_the_limit_is_refused_at_once(pods: list[Pod], tmp_path: Path, data: list[bytes]) -> None:
    pods[1].hold(SHARDS, data)
    copy = open_copy(tmp_path, limit=100)
    with pytest.raises(StagedError, match="at least 4031 bytes, more than the limit of 100 bytes") as caught:
        await pull_into(copy, stage_request([pods[1]]))
    assert caught.value.fault is StagedFault.TOO_LARGE


async def test_a_full_volume_ends_the_pull_at_once(
    pods: list[Pod], tmp_path: Path, data: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    end = pods[1].hold(SHARDS, data)
    copy = open_copy(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StagedError, match="cannot be written: No space left on device") as caught:
            await pull_into(copy, stage_request([pods[1]]))
    assert caught.value.fault is StagedFault.NO_SPACE
    assert await pull_into(copy, stage_request([pods[1]])) == end


async def test_the_deadline_names_what_is_missing(pods: list[Pod], tmp_path: Path, data: list[bytes]) -> None:
    peer, store = pods
    await peer.stop()
    store.copy.add_shard(SHARDS[0])
    add_piece(store, data, 0, 0)
    request = stage_request(pods, deadline=1).model_copy(update={"names": {peer.url: "engine e0"}})
    unreachable = rf"From engine e0 \({peer.url}\): it cannot be reached \(Connection refused\)\."
    with pytest.raises(StagedError, match=rf"after 1 s: 1000 of 4031 announced bytes have arrived\. .*{unreachable}") as caught:
        await pull_into(open_copy(tmp_path), request)
    assert caught.value.fault is StagedFault.LATE


async def test_a_wrong_ticket_is_named_at_the_deadline(pods: list[Pod], tmp_path: Path, data: list[bytes]) -> None:
    pods[1].hold(SHARDS, data)
    with pytest.raises(StagedError, match=r"no shard has been announced\. .* answered 403 to GET .* does not hold the ticket"):
        await pull_into(open_copy(tmp_path), stage_request([pods[1]], ticket="wrong", deadline=0.5))


async def test_a_copy_that_is_deleted_meanwhile_ends_the_pull(pods: list[Pod], tmp_path: Path) -> None:
    pods[1].copy.add_shard(SHARDS[0])
    held = copies(tmp_path)
    copy = held.open(update_id(), TICKET, LIMIT)
    task = asyncio.create_task(pull_into(copy, stage_request([pods[1]])))
    await until(lambda: len(copy.index.shards) == 1)
    await held.keep(set())
    pods[1].copy.add_shard(Shard(tensors=SHARDS[1].tensors))
    with pytest.raises(StagedError, match="deleted meanwhile") as caught:
        await task
    assert caught.value.fault is StagedFault.DELETED


async def test_a_pull_without_parents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StagedError, match="has no parent"):
        await pull_into(open_copy(tmp_path), stage_request([]))
