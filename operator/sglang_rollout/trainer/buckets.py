"""Cut the tensors of a push into flattened buckets, one per broadcast. Pure, and without torch.

SGLang receives a bucket (``load_format: flattened_bucket``) as one byte buffer: the raw bytes of its tensors, in the
order of the lists in the request and without padding. SGLang refuses a tensor whose offset is not a multiple of its
element size, so a tensor that would be misaligned starts a new bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


class Tensor(Protocol):
    """The part of a ``torch.Tensor`` that the planning reads."""

    @property
    def dtype(self) -> object:
        """Type of the elements; ``str()`` gives ``torch.bfloat16``."""

    @property
    def shape(self) -> Iterable[int]:
        """Sizes of the dimensions."""

    def element_size(self) -> int:
        """Return the bytes per element."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, type and shape of one tensor, in SGLang's form."""

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
    """Tensors that are sent in one broadcast."""

    items: tuple[tuple[TensorSpec, T], ...]
    nbytes: int
    last: bool
    """True if no further bucket follows in this push."""

    def request(self, group_name: str) -> dict[str, Any]:
        """Return the part of the body of ``/update_weights_from_distributed`` that describes the tensors."""
        specs = [spec for spec, _ in self.items]
        return {
            "names": [spec.name for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": group_name,
            "load_format": "flattened_bucket",
        }

    def offsets(self) -> list[tuple[int, T]]:
        """Return each tensor with its byte offset in the buffer."""
        placed, offset = [], 0
        for spec, tensor in self.items:
            placed.append((offset, tensor))
            offset += spec.nbytes
        return placed


def describe_tensor(tensor: Tensor, name: str) -> TensorSpec:
    """Return the spec of a torch tensor."""
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.element_size())


def named_pairs(named_tensors: Mapping[str, T] | Iterable[tuple[str, T]]) -> Iterable[tuple[str, T]]:
    """Return pairs of name and tensor, also for a state dict. An iterator is not consumed, because it may gather shards."""
    return named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors


def plan_buckets(items: Iterable[tuple[TensorSpec, T]], bucket_bytes: int) -> Iterator[Bucket[T]]:
    """Cut the tensors into buckets of at most ``bucket_bytes``, in the given order. A larger tensor gets its own bucket.

    Lazy: before a bucket is yielded, one tensor after it is read, to know whether the bucket is the last one.

    Raises:
        ValueError: A name appears twice, a tensor is empty, or ``bucket_bytes`` is not positive.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; it must be positive.")
    seen: set[str] = set()
    held: list[tuple[TensorSpec, T]] = []
    size = 0
    for spec, tensor in items:
        _check_spec(spec, seen)
        if held and (size + spec.nbytes > bucket_bytes or size % spec.itemsize):
            yield Bucket(tuple(held), size, last=False)
            held, size = [], 0
        held.append((spec, tensor))
        size += spec.nbytes
    if held:
        yield Bucket(tuple(held), size, last=True)


def _check_spec(spec: TensorSpec, seen: set[str]) -> None:
    if spec.name in seen:
        raise ValueError(f"Tensor {spec.name!r} appears twice in one push; send each name once.")
    if spec.nbytes == 0:
        raise ValueError(f"Tensor {spec.name!r} has shape {list(spec.shape)} and so no bytes to send; leave it out.")
    seen.add(spec.name)
