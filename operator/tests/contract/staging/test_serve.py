"""Index and pieces of staged versions over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from sglang_rollout.staging import send_file
from sglang_rollout.wire.ports import STAGED, TICKET_HEADER
from sglang_rollout.wire.staged import PIECE_BYTES, IndexReply
from tests.contract.support.staging_pods import SECONDS, Pod, get, pull_into, run_pod, stage_request
from tests.support.staged import TICKET, fill, open_copy, pieces, random_version, read_data, sha256, shard, update_id

U = f"/{update_id()}"


Run = Callable[[Coroutine[Any, Any, None]], None]
BOTH_LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
"""Agents run uvloop, which has no ``sendfile``."""


@pytest.fixture
async def pod(tmp_path: Path) -> AsyncIterator[Pod]:
    async with run_pod(tmp_path / "pod") as made:
        yield made


@BOTH_LOOPS
def test_whole_pieces_arrive(run: Run, tmp_path: Path) -> None:
    """The pieces are larger than any buffer of a connection, so the sender has to wait for the reader."""
    shards = [shard(2 * PIECE_BYTES + 123), shard(0), shard(4567)]
    data = random_version(shards)
    copy = open_copy(tmp_path)

    async def check() -> None:
        async with run_pod(tmp_path / "pod") as pod:
            end = pod.hold(shards, data)
            assert await pull_into(copy, stage_request([pod], digest=end.digest)) == end
            assert pod.pieces_given == 4

    run(check())
    assert read_data(copy) == data


async def test_the_index_grows_while_a_reader_follows(pod: Pod) -> None:
    copy, data = pod.copy, b"12345"
    waiting = asyncio.create_task(get(pod.url, f"{U}/index?from=0&wait=25"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    copy.add_shard(shard(5))
    first = IndexReply.model_validate_json((await asyncio.wait_for(waiting, SECONDS))[1])
    assert ([entry.shard for entry in first.entries], first.next) == ([shard(5)], 1)
    fill_rest = asyncio.create_task(get(pod.url, f"{U}/index?from=1&wait=25"))
    copy.write_piece(0, 0, data, sha256(data))
    end = copy.seal()
    rest = IndexReply.model_validate_json((await asyncio.wait_for(fill_rest, SECONDS))[1])
    assert [entry.piece.digest for entry in rest.entries if entry.piece] + [entry.end for entry in rest.entries if entry.end] == [
        sha256(data),
        end,
    ]
    assert rest.next == 3


async def test_a_question_without_news_ends_at_its_deadline(pod: Pod) -> None:
    pod.copy.add_shard(shard(5))
    for wait in ("0", "0.1"):
        status, body, _ = await asyncio.wait_for(get(pod.url, f"{U}/index?from=1&wait={wait}"), SECONDS)
        assert (status, json.loads(body)) == (200, {"entries": [], "next": 1, "received": 0})


async def test_long_indexes_come_in_parts(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_rollout.staging import serve

    monkeypatch.setattr(serve, "_MAX_ENTRIES", 4)
    monkeypatch.setattr(serve, "_MAX_TENSORS", 2)
    shards = [shard(1), shard(1, 1, 1), shard(1), shard(1)]
    fill(pod.copy, shards, random_version(shards))
    position, counts = 0, []
    while position < len(pod.copy.index.entries):
        reply = IndexReply.model_validate_json((await get(pod.url, f"{U}/index?from={position}"))[1])
        assert reply.next == position + len(reply.entries)
        counts.append(len(reply.entries))
        position = reply.next
    assert counts == [2, 1, 4, 2]


@pytest.mark.parametrize("ticket", ["", "wrong", "ticket2", "tickeü"])
async def test_a_wrong_ticket_is_refused(pod: Pod, ticket: str) -> None:
    pod.hold([shard(5)], [b"12345"])
    for path in ("/index", "/pieces/0/0"):
        status, body, _ = await get(pod.url, U + path, ticket)
        assert (status, json.loads(body)["code"]) == (403, "Forbidden")


async def test_a_copy_without_ticket_is_given_to_no_one(pod: Pod) -> None:
    pod.hold([shard(5)], [b"12345"])
    pod.copies.open(update_id(), "", 9)
    found = pod.copies.get(update_id())
    assert found is not None
    assert (await get(pod.url, f"{U}/index", ""))[0] == 403


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        (f"/{update_id(1)}/index", 404, "NotFound"),
        (f"/{update_id(1)}/pieces/0/0", 404, "NotFound"),
        (f"{U}/pieces/0/1", 404, "Unavailable"),
        (f"{U}/pieces/7/0", 404, "Unavailable"),
        (f"{U}/index?from=3", 409, "Conflict"),
        (f"{U}/index?from=-1", 400, "InvalidRequest"),
        (f"{U}/index?from=x", 400, "InvalidRequest"),
        (f"{U}/index?wait=26", 400, "InvalidRequest"),
        (f"{U}/index?wait=nan", 400, "InvalidRequest"),
        (f"{U}/pieces/0/-1", 400, "InvalidRequest"),
    ],
)
async def test_refusals_have_codes(pod: Pod, path: str, status: int, code: str) -> None:
    pod.copy.add_shard(shard(PIECE_BYTES + 5))
    pod.copy.write_piece(0, 0, bytes(PIECE_BYTES), sha256(bytes(PIECE_BYTES)))
    found, body, headers = await get(pod.url, path)
    assert (found, json.loads(body)["code"], json.loads(body)["success"]) == (status, code, False)
    assert headers.get("Retry-After") == ("1" if code == "Unavailable" else None)


async def connect(pod: Pod, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(pod.url.rsplit(":", 1)[1]), limit=1024)
    writer.write(f"GET {STAGED}{path} HTTP/1.1\r\nHost: x\r\n{TICKET_HEADER}: {TICKET}\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


@BOTH_LOOPS
def test_readers_that_leave_or_stall_do_not_disturb_others(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_file, "STALL_SECONDS", 0.3)
    shards = [shard(2 * PIECE_BYTES)]
    data = random_version(shards)

    async def check() -> None:
        async with run_pod(tmp_path / "pod") as pod:
            end = pod.hold(shards, data)
            for _ in range(3):
                _, writer = await connect(pod, f"{U}/pieces/0/0")
                writer.transport.abort()
            reader, writer = await connect(pod, f"{U}/pieces/0/1")
            assert await pull_into(open_copy(tmp_path), stage_request([pod], digest=end.digest)) == end
            await asyncio.sleep(0.5)  # the stalled reader reads nothing, until the sender has given it up
            assert await read_to_end(reader) < PIECE_BYTES
            writer.close()

    run(check())


async def read_to_end(reader: asyncio.StreamReader) -> int:
    """Return the number of bytes that arrive before the connection ends."""
    received = 0
    with suppress(ConnectionResetError):
        while chunk := await asyncio.wait_for(reader.read(2**20), SECONDS):
            received += len(chunk)
    return received


@BOTH_LOOPS
def test_a_connection_serves_several_pieces(run: Run, tmp_path: Path) -> None:
    shards = [shard(PIECE_BYTES + 5)]
    data = random_version(shards)

    async def check() -> None:
        async with run_pod(tmp_path / "pod") as pod:
            pod.hold(shards, data)
            reader, writer = await asyncio.open_connection("127.0.0.1", int(pod.url.rsplit(":", 1)[1]))
            for number, piece in enumerate(pieces(data[0])):
                writer.write(f"GET {STAGED}{U}/pieces/0/{number} HTTP/1.1\r\nHost: x\r\n{TICKET_HEADER}: {TICKET}\r\n\r\n".encode())
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS)
                assert head.startswith(b"HTTP/1.1 200 OK")
                assert f"Content-Length: {len(piece)}\r\n".encode() in head
                assert await asyncio.wait_for(reader.readexactly(len(piece)), SECONDS) == piece
            writer.close()

    run(check())
