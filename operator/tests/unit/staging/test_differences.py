"""Differences between pieces: exact for all bytes, refused if they are damaged, and never larger in memory than a piece."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from contextlib import suppress
from random import Random
from typing import Any
from unittest import mock

import pytest
from e2e.pages import read_blocks
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.staging import differences
from sglang_rollout.staging.differences import BLOCK_BYTES, decode, encode, most_bytes
from sglang_rollout.staging.index import StagedError, StagedFault
from tests.support.differences import apply

BASE = bytes(range(256)) * 3000
"""More than two blocks; the last one is shorter."""


def change(base: bytes, places: dict[int, int]) -> bytes:
    """Return ``base`` with other bytes at these places, which are counted modulo its size."""
    changed = bytearray(base)
    for place, value in places.items():
        if base:
            changed[place % len(base)] = value
    return bytes(changed)


@given(st.binary(max_size=2000), st.integers(1, 1000), st.dictionaries(st.integers(0, 2**24), st.integers(0, 255), max_size=200))
def test_a_base_becomes_exactly_the_new_bytes(start: bytes, repeats: int, places: dict[int, int]) -> None:
    base = start * repeats
    new = change(base, places)
    difference = encode(base, new)
    if difference is None:  # only a short piece, of which much has changed
        assert len(zlib.compress(differences.exclusive_or(base, new), 9)) + 20 + 6 * len(places) > most_bytes(len(new))
        return
    assert len(difference) <= most_bytes(len(new))
    assert (difference == b"") == (base == new)
    assert apply(base, difference) == apply(memoryview(base), memoryview(difference)) == new


@given(st.binary(max_size=3000), st.randoms(use_true_random=False))
def test_the_exclusive_or_is_the_same_without_numpy(first: bytes, random: Random) -> None:
    second = random.randbytes(len(first))
    fast = differences.exclusive_or(memoryview(first), memoryview(second))
    with mock.patch.object(differences, "_import_numpy", return_value=None):
        slow = differences.exclusive_or(memoryview(first), memoryview(second))
    assert fast == slow
    assert differences.exclusive_or(first, fast) == second


@pytest.mark.parametrize("code", ["e", "f", "d"])
def test_every_value_of_a_float_survives(code: str) -> None:
    """NaNs with different bits, both zeros and infinities are bytes as any others."""
    size = struct.calcsize(code)
    negative_zero, nan, other_nan = bytes([0] * (size - 1) + [0x80]), b"\xff" * size, b"\xff" * (size - 1) + b"\x7f"
    exotic = [bytes(size), negative_zero, nan, other_nan, struct.pack(code, float("-inf"))]
    base = struct.pack(code, 1.0) * 100_000
    new = b"".join(value + base[: 499 * size] for value in exotic) + base
    new = new[: len(base)]
    for one, other in ((base, new), (new, base)):
        difference = encode(one, other)
        assert difference
        assert apply(one, difference) == other


def test_a_difference_that_saves_little_is_not_made() -> None:
    changed = bytes(255 - byte for byte in BASE)
    noise = b"".join(struct.pack("<Q", (number * 0x9E3779B97F4A7C15) % 2**64) for number in range(len(BASE) // 8))
    assert encode(BASE, noise) is None
    assert len(encode(BASE, changed) or BASE) < 4000, "all bytes have changed, in the same way"
    assert encode(b"abcdef", b"abcdeg") is None
    assert (encode(b"", b""), apply(b"", b"")) == (b"", b"")
    with pytest.raises(ValueError, match="3 and 2 bytes"):
        encode(b"abc", b"ab")


NEW = change(BASE, {5: 1, 70_000: 2, len(BASE) - 1: 3})
GOOD = encode(BASE, NEW) or b""


def test_the_difference_of_the_page_is_applied() -> None:
    """The function in docs/reference/http-api.md, for trainers without the client."""
    test = "test_differences.py::test_the_difference_of_the_page_is_applied"
    (block,) = (block for block in read_blocks() if block.words.get("covered", "").endswith(test))
    page: dict[str, Any] = {}
    exec(compile(block.text, str(block), "exec"), page)
    for new in (NEW, BASE):
        assert apply(BASE, page["difference"](BASE, new)) == new
    assert page["difference"](BASE, BASE) == b""


@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_a_changed_byte_never_gives_other_bytes(place: int, flipped: int) -> None:
    damaged = GOOD[:place] + bytes([GOOD[place] ^ flipped]) + GOOD[place + 1 :]
    with suppress(StagedError):
        assert apply(BASE, damaged) == NEW, "zlib can write the same zeros in several ways"


@given(st.binary(min_size=1, max_size=3000))
def test_arbitrary_bytes_give_an_error(garbage: bytes) -> None:
    with pytest.raises(StagedError, match="The difference is damaged") as caught:
        apply(BASE, garbage)
    assert caught.value.fault is StagedFault.WRONG_BYTES


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        (GOOD[:-1], "its end is missing"),
        (GOOD[: len(GOOD) // 2], "its end is missing"),
        (GOOD + b"x", "bytes follow its end"),
        (GOOD + bytes(200_000), "bytes follow its end"),
        (zlib.compress(bytes(len(BASE) - 1)), f"a piece with {len(BASE) - 1} bytes, not {len(BASE)}"),
        (zlib.compress(bytes(len(BASE) + 1)), f"a piece with more than {len(BASE)} bytes"),
        (b"raw bytes", "zlib cannot read it"),
    ],
)
def test_a_damaged_difference_names_the_damage(difference: bytes, message: str) -> None:
    with pytest.raises(StagedError, match=message):
        apply(BASE, difference)


def test_a_difference_that_would_fill_the_memory_is_refused_at_the_end_of_the_piece() -> None:
    """A kilobyte of zlib may hold a megabyte of zeros."""
    bomb = zlib.compress(bytes(64 * 2**20), 9)
    tracemalloc.start()
    try:
        with pytest.raises(StagedError, match="more than 1000 bytes"):
            apply(bytes(1000), bomb)
        with pytest.raises(StagedError, match="more than"):
            for _ in decode(bomb, 10 * BLOCK_BYTES):
                pass
        assert tracemalloc.get_traced_memory()[1] < 8 * BLOCK_BYTES + len(bomb)
    finally:
        tracemalloc.stop()
