"""The difference between two pieces of the same size: their exclusive or, compressed with zlib. Pure.

Equal bytes give zeros, which zlib shortens to almost nothing, so a difference has the places and the values of what has changed. It is
exact for tensors of every type, because it knows only bytes. Trainers, the weight store and agents use it.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any

from sglang_rollout.staging.index import StagedError, StagedFault

BLOCK_BYTES = 2**18
"""Bytes of a piece that are compared or decompressed in one go. The interpreter's lock is held for as long."""
_INPUT_BYTES = 2**16
"""Compressed bytes that are given to zlib in one go, because zlib returns a copy of those that it did not need yet."""
_ZEROS = bytes(BLOCK_BYTES)

Bytes = bytes | memoryview


def most_bytes(size: int) -> int:
    """Return the most bytes that a difference of two pieces of ``size`` bytes may have. A larger one saves too little."""
    return size // 2


def encode(base: Bytes, new: Bytes) -> bytes | None:
    """Return the difference by which ``base`` becomes ``new``; empty if they are equal, None if it would be too large.

    Raises ValueError if they have different sizes.
    """
    if len(base) != len(new):
        raise ValueError(f"The pieces have {len(base)} and {len(new)} bytes.")
    # Run lengths alone: as small as a full search of these bytes, and ten times as fast if many have changed.
    deflate = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_RLE)
    parts: list[bytes] = []
    size, is_equal = 0, True
    for start in range(0, len(new), BLOCK_BYTES):
        changed = exclusive_or(base[start : start + BLOCK_BYTES], new[start : start + BLOCK_BYTES])
        is_equal = is_equal and changed == _ZEROS[: len(changed)]
        parts.append(deflate.compress(changed))
        size += len(parts[-1])
        if size > most_bytes(len(new)):
            return None
    if is_equal:
        return b""
    parts.append(deflate.flush())
    return b"".join(parts) if size + len(parts[-1]) <= most_bytes(len(new)) else None


def decode(difference: Bytes, size: int) -> Iterator[bytes]:
    """Yield the exclusive or of both pieces in blocks, which are together as long as a piece of ``size`` bytes.

    At most one block beyond ``size`` is decompressed, whatever the difference holds.

    Raises:
        StagedError: The difference is damaged, or belongs to a piece of another size.
    """
    if not len(difference):
        yield from (_ZEROS[: size - start] for start in range(0, size, BLOCK_BYTES))
        return
    inflate, left = zlib.decompressobj(), size
    for block in _decompress(inflate, memoryview(difference)):
        left -= len(block)
        if left < 0:
            raise _damaged(f"it is that of a piece with more than {size} bytes")
        yield block
    if not inflate.eof:
        raise _damaged("its end is missing")
    if left:
        raise _damaged(f"it is that of a piece with {size - left} bytes, not {size}")


def exclusive_or(first: Bytes, second: Bytes) -> bytes:
    """Return the exclusive or of two buffers of the same size. numpy is ten times as fast as Python's own numbers."""
    if (numpy := _import_numpy()) is not None:
        found: bytes = numpy.bitwise_xor(numpy.frombuffer(first, numpy.uint8), numpy.frombuffer(second, numpy.uint8)).tobytes()
        return found
    combined = int.from_bytes(first, "little") ^ int.from_bytes(second, "little")
    return combined.to_bytes(len(second), "little")


@cache
def _import_numpy() -> Any:
    """Return numpy; None without it. It is imported with the first difference, because most processes meet none."""
    with suppress(ImportError):
        return importlib.import_module("numpy")
    return None


def _decompress(inflate: zlib._Decompress, difference: memoryview) -> Iterator[bytes]:
    """Yield what zlib returns, in blocks of at most ``BLOCK_BYTES``."""
    for start in range(0, len(difference), _INPUT_BYTES):
        given: Bytes = difference[start : start + _INPUT_BYTES]
        while True:
            try:
                block = inflate.decompress(given, BLOCK_BYTES)
            except zlib.error as error:
                raise _damaged(f"zlib cannot read it ({error})") from None
            if block:
                yield block
            given = inflate.unconsumed_tail
            if inflate.eof and (inflate.unused_data or start + _INPUT_BYTES < len(difference)):
                raise _damaged("bytes follow its end")
            if inflate.eof or (not given and len(block) < BLOCK_BYTES):
                break


def _damaged(problem: str) -> StagedError:
    return StagedError(f"The difference is damaged: {problem}.", StagedFault.WRONG_BYTES)
