"""The safetensors file format, headers only. Pure.

A file is eight bytes (length of the header, unsigned, little-endian), the header (JSON, may end in blanks), and the tensors' bytes
without gaps. Published at https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeGuard

LENGTH_BYTES = 8
LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the format's own library."""
_METADATA = "__metadata__"

ITEM_BITS: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits of one element, by the format's name of the type."""

OF_TORCH: Mapping[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
}
"""The format's name of a type, by torch's (without ``torch.``)."""


class FormatError(Exception):
    """The bytes are no safetensors header; the message is a clause that follows the file's name."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as a header describes it."""

    dtype: str
    """``BF16``, ``F32``, …"""
    shape: tuple[int, ...]
    start: int
    end: int
    """Byte range within the data, which begins after the header."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says it holds."""

    tensors: Mapping[str, TensorEntry]
    data_start: int
    """Offset of the first tensor byte in the file."""

    @property
    def file_bytes(self) -> int:
        """How long the file must be, to the byte."""
        return self.data_start + max((entry.end for entry in self.tensors.values()), default=0)


def header_length(start: bytes) -> int:
    """Bytes of the JSON header, from the file's first eight bytes. Raises FormatError."""
    if len(start) < LENGTH_BYTES:
        raise FormatError(f"has {len(start)} bytes, too few for a safetensors file: it is truncated")
    length = int(struct.unpack("<Q", start[:LENGTH_BYTES])[0])
    if not 2 <= length <= LONGEST_HEADER:
        raise FormatError(f"does not begin with the length of a safetensors header (found {length})")
    return length


def parse_header(data: bytes) -> Header:
    """The header of a file, from its JSON bytes. Raises FormatError."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"has a header that is no JSON ({error})") from None
    if not isinstance(document, dict):
        raise FormatError("has a header that is no JSON object")
    tensors = {name: _entry(name, value) for name, value in document.items() if name != _METADATA}
    _contiguous(tensors)
    return Header(tensors, LENGTH_BYTES + len(data))


def build_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Length and header for tensors (name, type, shape) whose bytes follow in this order, padded so that they start at a multiple of 8."""
    document: dict[str, Any] = {_METADATA: {"format": "pt"}}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + prod(shape) * ITEM_BITS[dtype] // 8
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _entry(name: str, value: Any) -> TensorEntry:
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise FormatError(f"describes tensor {name} without a type, a shape and a byte range")
    start, end = offsets
    bits = ITEM_BITS.get(dtype)
    if bits is None:
        raise FormatError(f"holds tensor {name} of the unknown type {dtype}")
    wanted = prod(shape) * bits
    if (end - start) * 8 != wanted:
        raise FormatError(f"gives tensor {name} {end - start} bytes, but {dtype} {list(shape)} takes {wanted / 8:g}")
    return TensorEntry(dtype, tuple(shape), start, end)


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in value)


def _contiguous(tensors: Mapping[str, TensorEntry]) -> None:
    """The format allows neither holes nor overlaps, so that nothing can hide in a file."""
    reached = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != reached:
            raise FormatError(f"has a {'hole' if entry.start > reached else 'overlap'} before tensor {name}")
        reached = entry.end
