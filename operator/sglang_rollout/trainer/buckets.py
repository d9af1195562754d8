"""Planning of flattened buckets: which tensors travel together in one broadcast. Pure, and without torch.

SGLang receives a bucket (``load_format: flattened_bucket``) as ONE byte buffer: the raw bytes of its tensors, in the
order of the lists in the request and without padding. It refuses a tensor whose offset is not a multiple of its element
size, so a tensor that would be misaligned starts a new bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


class Tensor(Protocol):
    """What the planning reads of a ``torch.Tensor``."""

    @property
    def dtype(self) -> object:
        """Prints as ``torch.bfloat16``."""

    @property
    def shape(self) -> Iterable[int]:
        """Sizes of its dimensions."""

    def element_size(self) -> int:
        """Bytes per element."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, type and shape of one tensor, as SGLang wants to hear it."""

    name: str
    dtype: str
    """Without ``torch.``: ``bfloat16``."""
    shape: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor's contiguous bytes."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Bucket(Generic[T]):
    """Tensors that travel in one broadcast."""

    items: tuple[tuple[TensorSpec, T], ...]
    nbytes: int
    last: bool
    """No further bucket follows in this push."""

    def request(self, group_name: str) -> dict[str, Any]:
        """The part of the body of ``/update_weights_from_distributed`` that describes the tensors."""
        specs = [spec for spec, _ in self.items]
        return {
            "names": [spec.name for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": group_name,
            "load_format": "flattened_bucket",
        }

    def offsets(self) -> list[tuple[int, T]]:
        """Each tensor with its byte offset in the buffer."""
        placed, offset = [], 0
        for spec, tensor in self.items:
            placed.append((offset, tensor))
            offset += spec.nbytes
        return placed


def described(tensor: Tensor, name: str) -> TensorSpec:
    """The spec of a torch tensor."""
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.element_size())


def pairs(named_tensors: Mapping[str, T] | Iterable[tuple[str, T]]) -> Iterable[tuple[str, T]]:
    """A state dict or an iterable of (name, tensor), as the latter. An iterator is consumed lazily: it may gather
    shards.
    """
    return named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors


def plan(items: Iterable[tuple[TensorSpec, T]], bucket_bytes: int) -> Iterator[Bucket[T]]:
    """Cut the tensors into buckets of at most ``bucket_bytes``, in the given order; a larger tensor gets a bucket for
    itself.

    Lazy: it reads one tensor further than the bucket it yields, to know whether that bucket is the last one.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; it must be positive.")
    seen: set[str] = set()
    held: list[tuple[TensorSpec, T]] = []
    size = 0
    for spec, tensor in items:
        _checked(spec, seen)
        if held and (size + spec.nbytes > bucket_bytes or size % spec.itemsize):
            yield Bucket(tuple(held), size, last=False)
            held, size = [], 0
        held.append((spec, tensor))
        size += spec.nbytes
    if held:
        yield Bucket(tuple(held), size, last=True)


def _checked(spec: TensorSpec, seen: set[str]) -> None:
    if spec.name in seen:
        raise ValueError(f"Tensor {spec.name!r} appears twice in one push; send each name once.")
    if spec.nbytes == 0:
        raise ValueError(f"Tensor {spec.name!r} has shape {list(spec.shape)} and so no bytes to send; leave it out.")
    seen.add(spec.name)
