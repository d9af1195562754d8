"""The index of a version: its shards, the digests of the pieces that have arrived, and the digest of the version. Pure.

An index only grows. Entries that cannot follow the entries before them are refused, so a reader may trust the order but not the digests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from enum import StrEnum

from sglang_rollout.checkpoints.format import ITEM_BITS, MAX_HEADER_BYTES, MAX_LENGTH, build_header, multiply
from sglang_rollout.wire.reasons import quote_value
from sglang_rollout.wire.staged import MAX_SHARDS, PIECE_BYTES, IndexEntry, Piece, Shard, StagedTensor, VersionEnd


class StagedFault(StrEnum):
    """Why a version cannot be received or copied."""

    INVALID = "Invalid"
    """A shard, a piece or an index is malformed, or contradicts what has arrived before."""
    WRONG_BYTES = "WrongBytes"
    """Bytes do not have the announced digest or length."""
    WRONG_DIGEST = "WrongDigest"
    """A complete version does not have the demanded digest."""
    TOO_LARGE = "TooLarge"
    """The version is larger than the limit."""
    NO_SPACE = "NoSpace"
    """The volume is full or cannot be written."""
    INCOMPLETE = "Incomplete"
    """Pieces are missing."""
    LATE = "Late"
    """The deadline has passed."""
    DELETED = "Deleted"
    """The copy has been deleted or started again meanwhile."""


class StagedError(Exception):
    """A version cannot be received or copied. ``str()`` is a sentence for people; programs compare ``fault``."""

    def __init__(self, message: str, fault: StagedFault = StagedFault.INVALID) -> None:
        super().__init__(message)
        self.fault = fault


def too_large(total: int, limit: int) -> StagedError:
    """Return the error of a version with more bytes than the limit."""
    message = (
        f"The version has at least {total} bytes, more than the limit of {limit} bytes (spec.weights.staging.sizeLimit)."
        " Raise the limit, or send a smaller version."
    )
    return StagedError(message, StagedFault.TOO_LARGE)


def tensor_bytes(tensor: StagedTensor) -> int:
    """Return the bytes of a tensor. Raises StagedError for an unknown type or an impossible shape."""
    bits = ITEM_BITS.get(tensor.dtype)
    if bits is None:
        raise StagedError(
            f"Tensor {quote_value(tensor.name)} has the unknown type {quote_value(tensor.dtype)}; use safetensors' names: BF16."
        )
    if any(length < 0 for length in tensor.shape):
        raise StagedError(f"Tensor {quote_value(tensor.name)} has a negative length in its shape {quote_value(tensor.shape)}.")
    items = multiply(tensor.shape, MAX_LENGTH)
    if items is None or max(tensor.shape, default=0) > MAX_LENGTH:
        raise StagedError(f"Tensor {quote_value(tensor.name)} has an impossible shape: it has more than {MAX_LENGTH} elements.")
    size, rest = divmod(items * bits, 8)
    if rest:
        message = (
            f"Tensor {quote_value(tensor.name)} of type {tensor.dtype} and shape {quote_value(tensor.shape)} has no whole number of bytes."
        )
        raise StagedError(message)
    return size


def shard_bytes(shard: Shard) -> int:
    """Return the bytes of a shard's tensors, without its header. Raises StagedError for a malformed tensor."""
    return sum(tensor_bytes(tensor) for tensor in shard.tensors)


def shard_header(shard: Shard) -> bytes:
    """Return the header of a shard's file. Raises StagedError for a shard that no safetensors file can hold."""
    shard_bytes(shard)  # checks types and shapes
    names = {tensor.name for tensor in shard.tensors}
    if len(names) < len(shard.tensors):
        raise StagedError("A shard names a tensor twice: each tensor of a shard needs its own name.")
    if "__metadata__" in names:
        raise StagedError("A shard has a tensor with the name '__metadata__', which safetensors reserves.")
    header = build_header((tensor.name, tensor.dtype, tuple(tensor.shape)) for tensor in shard.tensors)
    if len(header) > MAX_HEADER_BYTES:
        raise StagedError(f"A shard's header has {len(header)} bytes, more than the {MAX_HEADER_BYTES} of safetensors: send more shards.")
    return header


def piece_count(size: int) -> int:
    """Return the number of pieces of a shard with this many bytes."""
    return -(-size // PIECE_BYTES)


def piece_size(size: int, piece: int) -> int:
    """Return the bytes of one piece of a shard with ``size`` bytes. Raises StagedError for a piece that the shard does not have."""
    if not 0 <= piece < piece_count(size):
        raise StagedError(f"There is no piece {piece}: the shard has {size} bytes, which is this number of pieces: {piece_count(size)}.")
    return min(PIECE_BYTES, size - piece * PIECE_BYTES)


def piece_offset(piece: int) -> int:
    """Return the offset of a piece in the bytes of its shard's tensors."""
    return piece * PIECE_BYTES


def version_digest(shards: Sequence[Shard], digests: Mapping[tuple[int, int], str]) -> str:
    """Return the digest of a complete version.

    SHA-256 over, for each shard in order: compact JSON of ``[[name, dtype, shape], ...]``, then the digests of its pieces in order, each
    followed by a line feed. Raises StagedError if a piece has no digest.
    """
    total = hashlib.sha256()
    for number, shard in enumerate(shards):
        described = [[tensor.name, tensor.dtype, tensor.shape] for tensor in shard.tensors]
        total.update(json.dumps(described, separators=(",", ":")).encode() + b"\n")
        for piece in range(piece_count(shard_bytes(shard))):
            digest = digests.get((number, piece))
            if digest is None:
                raise StagedError(f"Piece {piece} of shard {number} has not arrived.", StagedFault.INCOMPLETE)
            total.update(digest.encode() + b"\n")
    return total.hexdigest()


class Index:
    """The index of one version. Only ``add`` and ``seal`` change it; the order of the pieces does not change the digest."""

    def __init__(self) -> None:
        self.entries: list[IndexEntry] = []
        self.shards: list[Shard] = []
        self.sizes: list[int] = []
        """Bytes of each shard's tensors."""
        self.digests: dict[tuple[int, int], str] = {}
        """Digest of each piece that has arrived, by shard and piece."""
        self.end: VersionEnd | None = None
        self.bytes = 0
        """Bytes of all tensors of the shards that are known."""
        self.bytes_arrived = 0
        self._pieces = 0

    @property
    def is_full(self) -> bool:
        """True if no piece of a known shard is missing."""
        return len(self.digests) == self._pieces

    def missing(self, limit: int) -> list[tuple[int, int]]:
        """Return shard and piece of the first ``limit`` pieces that have not arrived."""
        found: list[tuple[int, int]] = []
        if self.is_full:
            return found
        for shard, size in enumerate(self.sizes):
            for piece in range(piece_count(size)):
                if (shard, piece) not in self.digests:
                    if len(found) >= limit:
                        return found
                    found.append((shard, piece))
        return found

    def add(self, entry: IndexEntry) -> bool:
        """Add an entry. Return False for a piece or an end that is there already.

        Raises:
            StagedError: The entry is malformed, contradicts an earlier entry, or cannot follow yet. The index is unchanged.
        """
        if sum(part is not None for part in (entry.shard, entry.piece, entry.end)) != 1:
            raise StagedError("An entry of an index must have exactly one of shard, piece and end.")
        if entry.shard is not None:
            added = self._add_shard(entry.shard)
        elif entry.piece is not None:
            added = self._add_piece(entry.piece)
        else:
            added = entry.end is not None and self._add_end(entry.end)
        if added:
            self.entries.append(entry)
        return added

    def seal(self) -> VersionEnd:
        """Add the end of a complete version, and return it. Raises StagedError while pieces are missing."""
        if self.end is None:
            self.add(IndexEntry(end=self._compute_end()))
        assert self.end is not None  # noqa: S101 - add has set it
        return self.end

    def piece_size(self, shard: int, piece: int) -> int:
        """Return the bytes of a piece. Raises StagedError if the version does not have the piece."""
        if not 0 <= shard < len(self.sizes):
            raise StagedError(f"There is no shard {shard}. Number of shards that were announced: {len(self.sizes)}.")
        try:
            return piece_size(self.sizes[shard], piece)
        except StagedError as error:
            raise StagedError(f"Shard {shard}: {error}") from None

    def _add_shard(self, shard: Shard) -> bool:
        if self.end is not None:
            raise StagedError("A shard follows the end of the version.")
        if len(self.shards) >= MAX_SHARDS:
            raise StagedError(f"The version has more than {MAX_SHARDS} shards: send larger shards.")
        size = shard_bytes(shard)
        self.shards.append(shard)
        self.sizes.append(size)
        self.bytes += size
        self._pieces += piece_count(size)
        return True

    def _add_piece(self, piece: Piece) -> bool:
        size, key = self.piece_size(piece.shard, piece.piece), (piece.shard, piece.piece)
        known = self.digests.get(key)
        if known == piece.digest:
            return False
        if known is not None:
            raise StagedError(f"Piece {piece.piece} of shard {piece.shard} is there already, with other bytes (SHA-256 {known[:12]}…).")
        self.digests[key] = piece.digest
        self.bytes_arrived += size
        return True

    def _add_end(self, end: VersionEnd) -> bool:
        if self.end == end:
            return False
        if end != self._compute_end():
            raise StagedError("The end of the version does not follow from its shards and pieces: its digest or its size is wrong.")
        self.end = end
        return True

    def _compute_end(self) -> VersionEnd:
        if not self.shards:
            raise StagedError("The version has no shards.", StagedFault.INCOMPLETE)
        missing = self.missing(1)
        if missing:
            (shard, piece), count = missing[0], self._pieces - len(self.digests)
            message = f"{count} of {self._pieces} pieces have not arrived; the first is piece {piece} of shard {shard}."
            raise StagedError(message, StagedFault.INCOMPLETE)
        return VersionEnd(digest=version_digest(self.shards, self.digests), bytes=self.bytes)
