"""The index of a version: what may follow what, and that the order of pieces does not matter."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.checkpoints.format import LENGTH_BYTES, parse_header
from sglang_rollout.staging import index as staging
from sglang_rollout.staging.index import Index, StagedError, StagedFault, piece_count, piece_size, shard_bytes, shard_header, version_digest
from sglang_rollout.wire.staged import PIECE_BYTES, IndexEntry, Piece, Shard, StagedTensor, VersionEnd
from tests.support.staged import all_pieces, sha256, shard

A, B = sha256(b"a"), sha256(b"b")
SHARDS = [shard(3 * PIECE_BYTES - 5, 10), shard(PIECE_BYTES), shard(0), shard(7)]
"""Shards of 4, 1, 0 and 1 pieces."""


def digest_of(shard: int, piece: int) -> str:
    return sha256(f"{shard}/{piece}".encode())


def entry(shard: int, piece: int, digest: str = "") -> IndexEntry:
    return IndexEntry(piece=Piece(shard=shard, piece=piece, digest=digest or digest_of(shard, piece)))


def full_index() -> Index:
    index = Index()
    for each in SHARDS:
        index.add(IndexEntry(shard=each))
    for key in all_pieces(SHARDS):
        index.add(entry(*key))
    return index


@given(st.integers(0, 10 * PIECE_BYTES))
def test_pieces_cover_a_shard_without_gap(size: int) -> None:
    sizes = [piece_size(size, piece) for piece in range(piece_count(size))]
    assert sum(sizes) == size
    assert all(0 < each <= PIECE_BYTES for each in sizes)
    assert set(sizes[:-1]) <= {PIECE_BYTES}
    for piece in (-1, piece_count(size)):
        with pytest.raises(StagedError, match="There is no piece"):
            piece_size(size, piece)


@given(st.data())
def test_any_order_of_entries_gives_the_same_digest(data: st.DataObject) -> None:
    """Shards come in order; pieces come in any order after their shard, some of them twice."""
    index, open_pieces, shards = Index(), list[tuple[int, int]](), list(SHARDS)
    while shards or open_pieces:
        if shards and (not open_pieces or data.draw(st.booleans())):
            number = len(SHARDS) - len(shards)
            index.add(IndexEntry(shard=shards.pop(0)))
            open_pieces += [(number, piece) for piece in range(piece_count(shard_bytes(SHARDS[number])))]
            continue
        key = data.draw(st.sampled_from(open_pieces))
        assert index.add(entry(*key))
        assert not index.add(entry(*key))
        open_pieces.remove(key)
    assert index.is_full
    assert index.bytes_arrived == index.bytes == sum(map(shard_bytes, SHARDS))
    assert index.seal() == full_index().seal()
    assert len(index.entries) == len(SHARDS) + len(all_pieces(SHARDS)) + 1


def test_the_digest_is_what_its_definition_says() -> None:
    text = b""
    for number, each in enumerate(SHARDS):
        text += json.dumps([[t.name, t.dtype, t.shape] for t in each.tensors], separators=(",", ":")).encode() + b"\n"
        text += b"".join(digest_of(number, piece).encode() + b"\n" for piece in range(piece_count(shard_bytes(each))))
    end = full_index().seal()
    assert end == VersionEnd(digest=hashlib.sha256(text).hexdigest(), bytes=sum(map(shard_bytes, SHARDS)))
    assert version_digest(SHARDS, full_index().digests) == end.digest


@pytest.mark.parametrize("change", ["name", "dtype", "shape", "piece", "order"])
def test_the_digest_depends_on_everything(change: str) -> None:
    tensor = StagedTensor(name="a", dtype="U8", shape=[4, 2])
    shards, digests = [Shard(tensors=[tensor]), shard(8)], {(0, 0): A, (1, 0): B}
    before = version_digest(shards, digests)
    if change == "piece":
        digests[1, 0] = A
    elif change == "order":
        shards.reverse()
    else:
        other = {"name": "b", "dtype": "I8", "shape": [2, 4]}
        shards[0] = Shard(tensors=[tensor.model_copy(update={change: other[change]})])
    assert version_digest(shards, digests) != before


@given(st.sets(st.sampled_from(all_pieces(SHARDS))), st.integers(0, 8))
def test_missing_pieces(arrived: set[tuple[int, int]], limit: int) -> None:
    index = Index()
    for each in SHARDS:
        index.add(IndexEntry(shard=each))
    for key in arrived:
        index.add(entry(*key))
    expected = [key for key in all_pieces(SHARDS) if key not in arrived]
    assert index.missing(limit) == expected[:limit]
    assert index.is_full == (not expected)
    if expected:
        with pytest.raises(
            StagedError, match=f"{len(expected)} of 6 pieces have not arrived; the first is piece {expected[0][1]}"
        ) as caught:
            index.seal()
        assert caught.value.fault is StagedFault.INCOMPLETE


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (IndexEntry(), "exactly one"),
        (IndexEntry(shard=shard(1), end=VersionEnd(digest=A, bytes=1)), "exactly one"),
        (entry(0, 0, A), "is there already, with other bytes"),
        (entry(0, 4), "Shard 0: There is no piece 4: .* number of pieces: 4"),
        (entry(2, 0), "There is no piece 0"),
        (entry(4, 0), r"There is no shard 4\. Number of shards that were announced: 4"),
        (IndexEntry(end=VersionEnd(digest=A, bytes=1)), "does not follow"),
        (IndexEntry(shard=shard(1, dtype="U7")), "unknown type 'U7'"),
        (IndexEntry(shard=shard(-1)), "negative length"),
        (IndexEntry(shard=shard(3, dtype="F4")), "no whole number of bytes"),
    ],
)
def test_an_entry_that_cannot_follow_changes_nothing(wrong: IndexEntry, message: str) -> None:
    index = full_index()
    before = list(index.entries), dict(index.digests), index.bytes, index.bytes_arrived
    with pytest.raises(StagedError, match=message) as caught:
        index.add(wrong)
    assert caught.value.fault is StagedFault.INVALID
    assert (list(index.entries), index.digests, index.bytes, index.bytes_arrived) == before
    assert index.seal() == full_index().seal()


def test_nothing_new_follows_the_end() -> None:
    index = full_index()
    end = index.seal()
    assert index.seal() == end
    assert not index.add(IndexEntry(end=end))
    assert not index.add(entry(0, 1))
    for wrong in (IndexEntry(shard=shard(1)), entry(0, 1, A), IndexEntry(end=VersionEnd(digest=A, bytes=end.bytes))):
        with pytest.raises(StagedError):
            index.add(wrong)


def test_a_version_without_shards_has_no_end() -> None:
    with pytest.raises(StagedError, match="no shards"):
        Index().seal()


def test_a_version_has_a_limited_number_of_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "MAX_SHARDS", 4)
    with pytest.raises(StagedError, match="more than 4 shards"):
        full_index().add(IndexEntry(shard=shard(1)))


def test_the_header_of_a_shard() -> None:
    tensors = [
        StagedTensor(name="a", dtype="BF16", shape=[2, 3]),
        StagedTensor(name="b", dtype="F4", shape=[4]),
        StagedTensor(name="c", dtype="F32", shape=[]),
    ]
    found = parse_header(shard_header(Shard(tensors=tensors))[LENGTH_BYTES:])
    assert [(name, each.dtype, list(each.shape)) for name, each in found.tensors.items()] == [(t.name, t.dtype, t.shape) for t in tensors]
    assert found.file_bytes - found.data_start == shard_bytes(Shard(tensors=tensors)) == 12 + 2 + 4
    with pytest.raises(StagedError, match="names a tensor twice"):
        shard_header(Shard(tensors=[tensors[0], tensors[0]]))
    with pytest.raises(StagedError, match="__metadata__"):
        shard_header(Shard(tensors=[StagedTensor(name="__metadata__", dtype="U8", shape=[1])]))
