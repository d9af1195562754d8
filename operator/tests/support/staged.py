"""Staged versions for tests: shards, pieces, and copies filled without HTTP."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from sglang_rollout.checkpoints.folder import read_header
from sglang_rollout.staging import index
from sglang_rollout.staging.copies import Copies, Copy
from sglang_rollout.staging.index import piece_count, shard_bytes
from sglang_rollout.wire.staged import Shard, StagedTensor

TICKET = "ticket"
LIMIT = 2**40
PIECE = 1000
"""Bytes of a small piece."""


def use_small_pieces(monkeypatch: pytest.MonkeyPatch, size: int = PIECE) -> None:
    """Cut versions in pieces of a few bytes, so that a version of many pieces is small."""
    monkeypatch.setattr(index, "PIECE_BYTES", size)


def shard(*sizes: int, dtype: str = "U8", first: int = 0) -> Shard:
    """Return a shard with one tensor for each number of elements. Sizes are not checked, so that a test can make impossible ones."""
    return Shard(
        tensors=[StagedTensor.model_construct(name=f"layer.{first + n}", dtype=dtype, shape=[size]) for n, size in enumerate(sizes)]
    )


def update_id(number: int = 0) -> str:
    return f"{number:032x}"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pieces(data: bytes) -> list[bytes]:
    """Return the pieces of a shard's data."""
    size = index.piece_offset(1)
    return [data[start : start + size] for start in range(0, len(data), size)]


def fill_shard(copy: Copy, added: Shard, data: bytes) -> None:
    """Add a shard with all of its pieces."""
    copy.add_shard(added)
    for number, piece in enumerate(pieces(data)):
        copy.write_piece(len(copy.index.shards) - 1, number, piece, sha256(piece))


def random_version(shards: Sequence[Shard]) -> list[bytes]:
    """Return random data for each shard."""
    return [os.urandom(shard_bytes(each)) for each in shards]


def fill(copy: Copy, shards: Sequence[Shard], data: Sequence[bytes]) -> Copy:
    """Fill a copy with a whole version, and seal it."""
    for each, held in zip(shards, data, strict=True):
        fill_shard(copy, each, held)
    copy.seal()
    return copy


def read_data(copy: Copy) -> list[bytes]:
    """Return the data bytes of each shard of a copy, without headers."""
    return [copy.shard_path(number).read_bytes()[copy.data_start(number) :] for number in range(len(copy.index.shards))]


def copies(folder: Path) -> Copies:
    return Copies(folder / "volume", folder / "state")


def open_copy(folder: Path, number: int = 0, limit: int = LIMIT) -> Copy:
    return copies(folder).open(update_id(number), TICKET, limit)


def all_pieces(shards: Sequence[Shard]) -> list[tuple[int, int]]:
    return [(number, piece) for number, each in enumerate(shards) for piece in range(piece_count(shard_bytes(each)))]


def stage_model(copy: Copy, model: Path, *, shards: int = 2, flip: bool = True) -> Copy:
    """Fill a copy with the weights of a model, in ``shards`` shards. ``flip``: change the sign of every float32 element."""
    path = model / "model.safetensors"
    header, content = read_header(path), path.read_bytes()
    tensors = sorted(header.tensors.items())
    for number in range(shards):
        part = tensors[number::shards]
        described = [StagedTensor(name=name, dtype=entry.dtype, shape=list(entry.shape)) for name, entry in part]
        data = bytearray(b"".join(content[header.data_start + entry.start : header.data_start + entry.end] for _, entry in part))
        if flip:
            data[3::4] = bytes(byte ^ 0x80 for byte in data[3::4])
        fill_shard(copy, Shard(tensors=described), bytes(data))
    copy.seal()
    return copy
