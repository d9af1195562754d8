"""The tensors of one push: names, shapes and types, checked before the first call to the fleet, and cut into buckets.

Called by ``Fleet.push`` on every rank of the trainer. Never copies a tensor, never imports torch.

SGLang receives a bucket (``load_format: flattened_bucket``) as one byte buffer: the raw bytes of its tensors, in the
order of the lists in the request and without padding. SGLang refuses a tensor whose offset is not a multiple of its
element size, so a tensor that would be misaligned starts a new bucket.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import prod
from typing import Any, Generic, TypeVar

from sglang_rollout.checkpoints.format import DTYPE_OF_TORCH, ITEM_BITS
from sglang_rollout.wire.arguments import find_shape_problem, find_tensor_name_problem

T = TypeVar("T")
NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]]
Specs = Iterable[tuple[str, Sequence[int], Any]]
"""Name, shape and type (``torch.bfloat16`` or ``"bfloat16"``) of each tensor, in order."""
Shapes = Mapping[str, Sequence[int] | None]
"""Shape of each tensor of the engines' model, by name; None for packed values, whose shape is not comparable."""

WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})
"""Parts of names that FSDP1, ``torch.compile`` and activation checkpointing insert. Checkpoints do not have these parts."""
ITEM_BYTES: Mapping[str, int] = {
    **{name: ITEM_BITS[kind] // 8 for name, kind in DTYPE_OF_TORCH.items()},
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
}
"""Bytes per element of the types that can be sent, by torch's name."""
NAMES_OUTSIDE_CHECKPOINTS = ("lm_head.weight", "rotary_emb.inv_freq")
"""Ends of names that engines accept although a checkpoint lacks them: a tied output layer, and values that the engine computes."""
MAX_SHOWN_PROBLEMS = 5
"""Maximum problems in one message; a wrong model has thousands."""


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

    def placed_items(self) -> Iterator[tuple[int, TensorSpec, T]]:
        """Yield each tensor with its byte offset in the buffer."""
        offset = 0
        for spec, tensor in self.items:
            yield offset, spec, tensor
            offset += spec.nbytes


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


class NoTensorError(ValueError):
    """The push contains no tensor."""


def clean_name(name: str) -> str:
    """Return the name in a Hugging Face checkpoint: without the parts in ``WRAPPERS``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def is_sharded(tensor: Any) -> bool:
    """Return True for a ``DTensor``."""
    return hasattr(tensor, "full_tensor") and hasattr(tensor, "device_mesh")


def full_tensor(tensor: Any) -> Any:
    """Return the full tensor. For a ``DTensor`` this is a collective: every rank of its mesh must call it."""
    if not is_sharded(tensor):
        return tensor
    tensor, device = tensor.detach(), tensor.device_mesh.device_type
    # FSDP2 with CPUOffloadPolicy keeps shards in host memory, and the mesh's NCCL cannot gather from there.
    return (tensor if tensor.device.type == device else tensor.to(device)).full_tensor()


def mesh_ranks(tensor: Any) -> tuple[int, ...]:
    """Return the global ranks of a DTensor's mesh, in ascending order."""
    return tuple(sorted(tensor.device_mesh.mesh.flatten().tolist()))


def read_spec(name: Any, tensor: Any) -> TensorSpec:
    """Describe one tensor, with its cleaned name and, for a ``DTensor``, its full shape.

    Raises:
        ValueError: The tensor cannot be sent.
    """
    cleaned = clean_name(name) if isinstance(name, str) else ""
    if not cleaned:
        raise ValueError(f"{name!r} is not the name of a tensor.")
    problem = find_tensor_name_problem(cleaned, "the name of a tensor")
    if problem is not None:
        raise ValueError(problem)
    if not callable(getattr(tensor, "element_size", None)) or not hasattr(tensor, "shape"):
        is_array = hasattr(tensor, "shape") and hasattr(tensor, "dtype")
        advice = "convert it to one, for example with torch.from_numpy(...)" if is_array else "if it holds no weights, leave it out"
        raise ValueError(f"{name!r} is of type {type(tensor).__name__}, not a torch tensor; {advice}.")
    if getattr(tensor, "is_meta", False):
        raise ValueError(f"Tensor {name!r} is on the meta device and has no values; materialize it first.")
    if str(getattr(tensor, "layout", "torch.strided")) != "torch.strided":
        raise ValueError(f"Tensor {name!r} has the layout {tensor.layout}; only dense tensors can be sent.")
    dtype = str(tensor.dtype).removeprefix("torch.")
    _check_dtype(name, dtype)
    if is_sharded(tensor) and tensor.device_mesh.get_coordinate() is None:
        raise ValueError(f"Tensor {name!r} is on a mesh of ranks {list(mesh_ranks(tensor))}, which this rank is not part of.")
    return TensorSpec(cleaned, dtype, tuple(tensor.shape), tensor.element_size())


class Source:
    """The tensors that one rank pushes."""

    def __init__(self, named_tensors: NamedTensors, specs: Specs | None = None) -> None:
        """Read all entries of a collection, but only the first entry of an iterator, which may gather shards."""
        found = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
        self.is_repeatable = isinstance(found, Collection)
        """False for an iterator, whose tensors can be read once."""
        self._rest: Iterator[Any] = iter(())
        if isinstance(found, Collection):
            self._entries: list[Any] = list(found)
        else:
            self._rest = iter(found)
            self._entries = list(islice(self._rest, 1))
        self._sharded = {str(entry[0]): entry[1] for entry in self._entries if _is_pair(entry) and is_sharded(entry[1])}
        self._specs = None if specs is None else list(specs)
        self._declared: list[TensorSpec] | None = None
        self._model: Shapes | None = None
        self._known: list[TensorSpec] = []
        self.specs: list[TensorSpec] = []
        """Every tensor, after :meth:`check`; empty for an iterator without ``specs``."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the trainer that must push together, those of the largest mesh; empty without a ``DTensor``."""
        meshes = {id(tensor.device_mesh): tensor for tensor in self._sharded.values()}
        return max(map(mesh_ranks, meshes.values()), key=len, default=())

    def check(self, bucket_bytes: int) -> None:
        """Check every tensor that is known.

        Raises:
            ValueError: A tensor cannot be sent.
        """
        if not self._entries:
            raise NoTensorError("there is no tensor to push")
        if self._specs is not None:
            self.specs = self._declared = [_read_declared_spec(entry) for entry in self._specs]
        read = [self._read(entry) for entry in self._entries]
        self._check_meshes()
        originals: dict[str, Any] = {}
        for (name, _), (spec, _) in zip(self._entries, read, strict=True):
            if originals.setdefault(spec.name, name) != name:
                raise ValueError(f"{originals[spec.name]!r} and {name!r} are both the tensor {spec.name!r}; send each tensor once.")
        self._known = [spec for spec, _ in read]
        if self.is_repeatable:
            self.specs = [spec for spec, _ in self._compare_with_declared(iter(read))]
        for _ in plan_buckets(((spec, None) for spec in self.specs), bucket_bytes):
            pass

    def compare(self, model: Shapes) -> None:
        """Compare names and shapes with the engines' model. Tensors that an iterator yields later are compared then.

        Raises:
            ValueError: The engines' model lacks a name or has another shape.
        """
        self._model = model
        problems = list(filter(None, (_find_difference(spec, model) for spec in self.specs or self._known)))
        if problems:
            more = f" And {len(problems) - MAX_SHOWN_PROBLEMS} more." if len(problems) > MAX_SHOWN_PROBLEMS else ""
            raise ValueError(" ".join(problems[:MAX_SHOWN_PROBLEMS]) + more)

    def digest(self, *more: object) -> str:
        """Return a digest that is equal on two ranks if they push the same tensors."""
        sharded = sorted(self._sharded)
        return digest([[spec.name, spec.dtype, spec.shape] for spec in self.specs], sharded, *more)

    def __iter__(self) -> Iterator[tuple[TensorSpec, Any]]:
        """Yield every tensor with its spec, in order. Consumes an iterator.

        Raises:
            ValueError: A tensor cannot be sent, or differs from its spec or from the engines' model.
        """
        for spec, tensor in self._compare_with_declared(map(self._read, chain(self._entries, self._rest))):
            problem = _find_difference(spec, self._model) if self._model is not None and not self.specs else None
            if problem is not None:
                raise ValueError(problem)
            yield spec, tensor

    def _read(self, entry: Any) -> tuple[TensorSpec, Any]:
        if not _is_pair(entry):
            raise ValueError(f"an entry is of type {type(entry).__name__}, not a pair of name and tensor; pass model.state_dict().")
        name, tensor = entry
        if is_sharded(tensor) and not self._sharded:
            raise ValueError(f"Tensor {name!r} is a DTensor, but the first tensor is not; pass a list or a state dict, not an iterator.")
        return read_spec(name, tensor), tensor

    def _check_meshes(self) -> None:
        """Refuse meshes of which none contains all others, because ranks outside a mesh cannot gather its tensors."""
        ranks = set(self.ranks)
        for name, tensor in self._sharded.items():
            outside = sorted(set(mesh_ranks(tensor)) - ranks)
            if outside:
                raise ValueError(
                    f"Tensor {name!r} is on a mesh of ranks {list(mesh_ranks(tensor))}, other tensors of this push on one of "
                    f"ranks {sorted(ranks)}; push tensors of one mesh and its submeshes."
                )

    def _compare_with_declared(self, read: Iterator[tuple[TensorSpec, Any]]) -> Iterator[tuple[TensorSpec, Any]]:
        """Yield the same tensors, each compared with its entry in ``specs=``."""
        declared = iter(self._declared or ())
        for spec, tensor in read:
            if self._declared is not None and (expected := next(declared, None)) != spec:
                raise ValueError(f"the tensors give {_describe_spec(spec)} where specs has {_describe_spec(expected)}.")
            yield spec, tensor
        missing = next(declared, None)
        if missing is not None:
            raise ValueError(f"the tensors end where specs has {_describe_spec(missing)}.")


def digest(*values: object) -> str:
    """Return a digest of JSON values."""
    return hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, tuple | list) and len(entry) == 2


def _read_declared_spec(entry: Any) -> TensorSpec:
    if not isinstance(entry, tuple | list) or len(entry) != 3:
        raise ValueError(f"specs has the entry {entry!r}; each must be (name, shape, dtype).")
    name, shape, kind = entry
    cleaned = clean_name(name) if isinstance(name, str) else name
    problem = find_tensor_name_problem(cleaned, "a name in specs") or find_shape_problem(shape, f"specs of {name!r}")
    if problem is not None:
        raise ValueError(problem)
    dtype = str(kind).removeprefix("torch.")
    _check_dtype(name, dtype)
    return TensorSpec(cleaned, dtype, tuple(int(size) for size in shape), ITEM_BYTES[dtype])


def _check_dtype(name: str, dtype: str) -> None:
    if dtype not in ITEM_BYTES:
        raise ValueError(f"Tensor {name!r} has the type {dtype}, which cannot be sent; convert it to one of {', '.join(ITEM_BYTES)}.")


def _find_difference(spec: TensorSpec, model: Shapes) -> str | None:
    """Return why a tensor does not fit the engines' model; None if it fits."""
    if spec.name not in model:
        return None if spec.name.endswith(NAMES_OUTSIDE_CHECKPOINTS) else f"Tensor {spec.name!r} is not in the engines' model."
    shape = model[spec.name]
    if shape is None or tuple(shape) == spec.shape:
        return None
    return f"Tensor {spec.name!r} has shape {list(spec.shape)}, in the engines' model {list(shape)}."


def _describe_spec(spec: TensorSpec | None) -> str:
    return f"{spec.name!r} ({spec.dtype} {list(spec.shape)})" if spec is not None else "no tensor"
