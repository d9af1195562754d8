"""Copying a version from pods that have differences from the version before: what is sent, and what happens if a difference is wrong."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from sglang_rollout.staging.copies import DIFFERENCES, Copies, Copy
from sglang_rollout.staging.differences import encode
from sglang_rollout.staging.index import StagedError
from sglang_rollout.wire.ports import BASE_HEADER, STAGED, TICKET_HEADER
from tests.contract.support.staging_pods import Handler, Pod, pull_into, run_pod, stage_request
from tests.support.staged import (
    LIMIT,
    PIECE,
    TICKET,
    copies,
    fill,
    pieces,
    random_version,
    read_data,
    sha256,
    shard,
    update_id,
    use_small_pieces,
)

SHARDS = [shard(4 * PIECE + 1, 30), shard(PIECE), shard(7)]
BEFORE, NOW = update_id(1), update_id()
CHANGED, REPLACED = ((0, 0), (0, 2), (1, 0)), (0, 3)
"""Pieces of which the version changes a byte; and the piece that it replaces completely."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_pieces(monkeypatch)


@pytest.fixture
def old() -> list[bytes]:
    return random_version(SHARDS)


@pytest.fixture
def new(old: list[bytes]) -> list[bytes]:
    data = [bytearray(each) for each in old]
    for number, piece in CHANGED:
        data[number][PIECE * piece + 3] ^= 0x41
    number, piece = REPLACED
    data[number][PIECE * piece : PIECE * (piece + 1)] = random_version([shard(PIECE)])[0]
    return [bytes(each) for each in data]


@pytest.fixture
async def pods(tmp_path: Path) -> AsyncIterator[list[Pod]]:
    """A peer, and the store."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(run_pod(tmp_path / name)) for name in ("peer", "store")]


def hold_old(held: Copies, old: list[bytes]) -> Copy:
    """Give a pod the version before, completely."""
    return fill(held.open(BEFORE, TICKET, LIMIT), SHARDS, old)


async def upload(store: Pod, old: list[bytes], new: list[bytes], limit: int = LIMIT) -> Copy:
    """Let the store take the version as a trainer sends it: differences, where they are shorter."""
    base = hold_old(store.copies, old)
    copy = store.copies.open(NOW, TICKET, limit)
    for each in SHARDS:
        copy.add_shard(each)
    for number, data in enumerate(new):
        for piece, (before, now) in enumerate(zip(pieces(old[number]), pieces(data), strict=True)):
            difference = encode(before, now)
            if difference is None:
                copy.write_piece(number, piece, now, sha256(now))
            else:
                assert await copy.patch_piece(number, piece, sha256(now), base, difference)
    copy.seal()
    assert read_data(copy) == new
    return copy


def asked(pod: Pod) -> set[str]:
    return {path.removeprefix(f"{STAGED}/{NOW}/pieces/") for path in pod.asked if "/pieces/" in path}


def places(*found: tuple[int, int]) -> set[str]:
    return {f"{number}/{piece}" for number, piece in found}


async def test_a_pod_with_the_version_before_copies_only_what_differs(
    pods: list[Pod], tmp_path: Path, old: list[bytes], new: list[bytes]
) -> None:
    """Also from a pod that has copied the differences itself."""
    peer, store = pods
    at_store = await upload(store, old, new)
    end = at_store.seal()
    base = hold_old(peer.copies, old)
    assert await pull_into(peer.copy, stage_request([store], digest=end.digest), base) == end
    assert asked(store) == places(*CHANGED, REPLACED), "equal pieces are not asked for"
    assert read_data(peer.copy) == new
    assert peer.copy.transferred == PIECE + at_store.differences.bytes

    last = copies(tmp_path / "last")
    copy = last.open(NOW, TICKET, LIMIT)
    assert await pull_into(copy, stage_request([peer, store], digest=end.digest), hold_old(last, old)) == end
    assert asked(peer) == places(*CHANGED, REPLACED)
    assert (read_data(copy), copy.transferred) == (new, peer.copy.transferred)


async def test_a_pod_without_the_version_before_copies_whole_pieces(
    pods: list[Pod], tmp_path: Path, old: list[bytes], new: list[bytes]
) -> None:
    end = (await upload(pods[1], old, new)).seal()
    other = copies(tmp_path / "other")
    unrelated = fill(other.open(update_id(2), TICKET, LIMIT), [shard(20), shard(PIECE)], random_version([shard(20), shard(PIECE)]))
    for number, base in enumerate((None, unrelated)):
        copy = copies(tmp_path / f"pod-{number}").open(NOW, TICKET, LIMIT)
        assert await pull_into(copy, stage_request([pods[1]]), base) == end
        assert (read_data(copy), copy.transferred) == (new, end.bytes)


async def test_equal_pieces_are_not_copied_however_the_version_came(pods: list[Pod], old: list[bytes], new: list[bytes]) -> None:
    """As of tensors that a trainer does not train, through a process group."""
    peer, store = pods
    end = store.hold(SHARDS, new)
    assert await pull_into(peer.copy, stage_request([store], digest=end.digest), hold_old(peer.copies, old)) == end
    assert asked(store) == places(*CHANGED, REPLACED)
    assert (read_data(peer.copy), peer.copy.transferred) == (new, PIECE * len(asked(store)))


async def test_a_version_that_has_vanished_is_no_base(pods: list[Pod], old: list[bytes], new: list[bytes]) -> None:
    peer, store = pods
    end, base = (await upload(store, old, new)).seal(), hold_old(peer.copies, old)
    for number in range(len(SHARDS)):
        base.shard_path(number).unlink()
    assert await pull_into(peer.copy, stage_request([store]), base) == end
    assert read_data(peer.copy) == new
    assert peer.copy.transferred >= end.bytes


DAMAGES = {
    "garbage": b"garbage",
    "other": zlib.compress(b"x" * PIECE),
    "size": zlib.compress(bytes(PIECE - 1)),
    "bomb": zlib.compress(bytes(100 * PIECE)),
    "large": bytes(PIECE),
    "nothing": b"",
}


@pytest.mark.parametrize("body", DAMAGES.values(), ids=DAMAGES)
async def test_a_wrong_difference_is_replaced_by_the_whole_piece(pods: list[Pod], old: list[bytes], new: list[bytes], body: bytes) -> None:
    peer, store = pods
    end = (await upload(store, old, new)).seal()

    async def lie(request: web.Request, handler: Handler) -> web.StreamResponse:
        base = request.headers.get(BASE_HEADER)
        return await handler(request) if base is None else web.Response(body=body, headers={BASE_HEADER: base})

    store.fault = lie
    assert await pull_into(peer.copy, stage_request([store]), hold_old(peer.copies, old)) == end
    assert read_data(peer.copy) == new
    assert peer.copy.differences.bytes == 0, "a wrong difference is not given to other pods"


async def test_a_difference_that_was_not_asked_for_is_refused(pods: list[Pod], old: list[bytes], new: list[bytes]) -> None:
    peer, store = pods
    await upload(store, old, new)

    async def lie(request: web.Request, handler: Handler) -> web.StreamResponse:
        return web.Response(body=b"", headers={BASE_HEADER: "0" * 64}) if "/pieces/" in request.path else await handler(request)

    store.fault = lie
    with pytest.raises(StagedError, match="which was not asked for"):
        await pull_into(peer.copy, stage_request([store]))


async def test_differences_stay_below_the_limit_of_the_version(pods: list[Pod], old: list[bytes], new: list[bytes]) -> None:
    """Without room for them the pods copy whole pieces."""
    peer, store = pods
    size = sum(map(len, new))
    copy = await upload(store, old, new, limit=size + 30)
    assert 0 < copy.differences.bytes <= 30
    await pull_into(peer.copy, stage_request([store]), hold_old(peer.copies, old))
    assert (read_data(peer.copy), peer.copy.transferred) == (new, copy.differences.bytes + PIECE * len([*CHANGED[1:], REPLACED]))


async def test_differences_are_deleted_when_the_next_version_begins(pods: list[Pod], old: list[bytes], new: list[bytes]) -> None:
    store = pods[1]
    copy = await upload(store, old, new)
    await store.copies.keep({BEFORE, NOW})
    folder = copy.folder / DIFFERENCES
    assert len(list(folder.iterdir())) == len(CHANGED)
    await store.copies.keep({NOW, update_id(3)})
    assert not folder.exists()
    assert copy.differences.bytes == 0
    assert read_data(copy) == new


async def test_a_restarted_pod_gives_whole_pieces(pods: list[Pod], old: list[bytes], new: list[bytes]) -> None:
    copy = await upload(pods[1], old, new)
    restarted = Copies(pods[1].copies.volume, pods[1].copies.volume.parent / "state").get(NOW)
    assert restarted is not None
    assert restarted.status().digest == copy.seal().digest
    assert not (copy.folder / DIFFERENCES).exists()


async def test_a_copy_that_starts_again_has_no_differences(pods: list[Pod], old: list[bytes], new: list[bytes]) -> None:
    copy = await upload(pods[1], old, new)
    await copy.reset()
    assert copy.differences.bytes == 0
    assert list(copy.folder.iterdir()) == []


async def test_a_difference_needs_the_ticket_of_the_version(pods: list[Pod], old: list[bytes], new: list[bytes]) -> None:
    end = hold_old(copies(pods[0].copies.volume.parent / "again"), old).seal()
    await upload(pods[1], old, new)
    url = f"{pods[1].url}{STAGED}/{NOW}/pieces/0/0"
    async with aiohttp.ClientSession() as session:
        for ticket, status in ((TICKET, 200), ("other", 403)):
            async with session.get(url, headers={TICKET_HEADER: ticket, BASE_HEADER: end.digest}) as answer:
                assert answer.status == status
                assert (answer.headers.get(BASE_HEADER) == end.digest) == (status == 200)
