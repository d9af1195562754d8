"""The safetensors file format, headers only. Pure.

A file is eight bytes (length of the header, unsigned, little-endian), the header (JSON, may end in blanks), and the tensors' bytes
without gaps. Published at https://github.com/huggingface/safetensors#format.

The ``safetensors`` library does not replace this module. Its ``safe_open`` needs numpy or torch to read shapes. Version 0.8.0 reports
truncated files and files with extra bytes by the same message, without sizes. Its writer takes all tensors at once.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeGuard

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The limit of the ``safetensors`` library."""
MAX_LENGTH = 2**63 - 1
"""Largest number in a header: torch has signed lengths of 64 bits."""
_MAX_DIGITS = 20
"""Digits of the largest unsigned number of 64 bits."""
_MAX_QUOTED = 200
_METADATA = "__metadata__"

ITEM_BITS: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits of one element, by the safetensors name of the type."""

DTYPE_OF_TORCH: Mapping[str, str] = {
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
"""Safetensors name of each type, by torch's name without ``torch.``."""
TORCH_DTYPES = (
    frozenset(DTYPE_OF_TORCH)
    | {"float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2", "complex64", "complex128"}
    | {
        *("double", "float", "half", "long", "int", "short"),
    }
)
"""Names of all types that a trainer may announce, also torch's short names."""


class FormatError(Exception):
    """The bytes are not a safetensors header. The message continues a sentence that begins with the name of the file."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The entry of one tensor in a header."""

    dtype: str
    """``BF16``, ``F32``, …"""
    shape: tuple[int, ...]
    start: int
    end: int
    """End of the byte range. Offsets count from the end of the header."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one file."""

    tensors: Mapping[str, TensorEntry]
    data_start: int
    """Offset of the first tensor's bytes in the file."""

    @property
    def file_bytes(self) -> int:
        """Exact length that the file must have."""
        return self.data_start + max((entry.end for entry in self.tensors.values()), default=0)


def header_length(start: bytes) -> int:
    """Return the length of the JSON header, given the first eight bytes of the file.

    Raises:
        FormatError: The bytes are not the length of a header.
    """
    if len(start) < LENGTH_BYTES:
        raise FormatError(f"has {len(start)} bytes, too few for a safetensors file: it is truncated")
    length = int(struct.unpack("<Q", start[:LENGTH_BYTES])[0])
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise FormatError(f"does not begin with the length of a safetensors header (found {length})")
    return length


def parse_header(data: bytes) -> Header:
    """Parse the JSON bytes of a header.

    Raises:
        FormatError: The header is malformed.
    """
    try:
        document = json.loads(data, parse_int=_parse_length)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"has a header that is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise FormatError("has a header that is not a JSON object")
    tensors = {name: _parse_entry(name, value) for name, value in document.items() if name != _METADATA}
    _check_contiguous(tensors)
    return Header(tensors, LENGTH_BYTES + len(data))


def build_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Return the header, with its length before it, of tensors (name, type, shape) whose bytes follow in this order.

    The header is padded, so that the bytes of the tensors start at a multiple of 8.
    """
    document: dict[str, Any] = {_METADATA: {"format": "pt"}}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + prod(shape) * ITEM_BITS[dtype] // 8
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _parse_entry(name: str, value: Any) -> TensorEntry:
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or not _is_naturals(shape) or not _is_naturals(offsets) or len(offsets) != 2:
        raise FormatError(f"describes tensor {_shorten(name)} without a type, a shape and a byte range")
    start, end = offsets
    bits = ITEM_BITS.get(dtype)
    if bits is None:
        raise FormatError(f"has tensor {_shorten(name)} of the unknown type {_shorten(dtype)}")
    items = multiply(shape, MAX_LENGTH)
    if items is None or (end - start) * 8 != items * bits:
        needed = "more than any file holds" if items is None else f"{items * bits / 8:g}"
        raise FormatError(f"gives tensor {_shorten(name)} {end - start} bytes, but {dtype} {_shorten(str(shape))} needs {needed}")
    return TensorEntry(dtype, tuple(shape), start, end)


def multiply(lengths: Sequence[int], most: int) -> int | None:
    """Return the product of the lengths of a tensor's shape; None if it is more than ``most``.

    A product of thousands of large numbers, as in a hostile header, would keep all threads of the process waiting for seconds.
    """
    if 0 in lengths:
        return 0
    product = 1
    for length in lengths:
        product *= length
        if product > most:
            return None
    return product


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}…"


def _parse_length(text: str) -> int:
    """Return a number of a header. A long one is refused before it is converted, which takes time by the square of its digits."""
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _is_naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= MAX_LENGTH for number in value
    )


def _check_contiguous(tensors: Mapping[str, TensorEntry]) -> None:
    """Refuse holes and overlaps, as the format does."""
    reached = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != reached:
            raise FormatError(f"has a {'hole' if entry.start > reached else 'overlap'} before tensor {_shorten(name)}")
        reached = entry.end
