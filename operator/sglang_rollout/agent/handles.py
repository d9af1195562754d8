"""Handles of tensors in ``/update_weights_from_tensor``, read without being opened. Pure.

SGLang unpickles what the trainer sends, and a pickle may call any function that the unpickler finds: that of SGLang 0.5.20 finds those of
``builtins`` and ``torch``. :func:`find_problem` follows the operations of a pickle on a stack of its own, and accepts only what torch
and SGLang write into handles of CUDA memory and of shared memory. A handle may still name any shared memory of the node.
"""

from __future__ import annotations

import base64
import itertools
import pickletools
from typing import Any

_REDUCTIONS = "torch.multiprocessing.reductions"
_WEIGHT_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_MODEL_RUNNER = "sglang.srt.model_executor.model_runner"
_BUCKET = "sglang.srt.weight_sync.tensor_bucket"
# File descriptors (multiprocessing.resource_sharer.DupFd) are missing, because only children of the trainer could receive them.
_FUNCTIONS = frozenset(
    {
        (_REDUCTIONS, "rebuild_tensor"),
        (_REDUCTIONS, "rebuild_cuda_tensor"),
        (_REDUCTIONS, "rebuild_typed_storage"),
        (_REDUCTIONS, "rebuild_storage_filename"),
        (_REDUCTIONS, "rebuild_storage_empty"),
        ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"),
        ("sglang.srt.patch_torch", "_rebuild_cuda_tensor_modified"),
        ("torch", "Size"),
    }
)
"""Names that a pickle may call."""
_NESTED = frozenset({(_WEIGHT_UPDATER, "LocalSerializedTensor"), (_MODEL_RUNNER, "LocalSerializedTensor")})
"""Class that holds one pickle for each rank."""
_CLASSES = _NESTED | {*itertools.product((_BUCKET, _MODEL_RUNNER), ("FlattenedTensorBucket", "FlattenedTensorMetadata"))}
"""Names of which a pickle may make objects."""
_DTYPES = """
    bfloat16 bool complex128 complex64 float16 float32 float4_e2m1fn_x2 float64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz
    float8_e8m0fnu int16 int32 int64 int8 uint16 uint32 uint64 uint8
"""
_NAMES = (
    _FUNCTIONS
    | _CLASSES
    | {("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("torch.storage", "TypedStorage"), ("torch.storage", "UntypedStorage")}
    | {("torch", dtype) for dtype in _DTYPES.split()}
)
"""All names of a pickle. Those that are neither functions nor classes of objects are arguments of functions."""
_CONSTANTS = """
    NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES
    BINBYTES8 EMPTY_TUPLE EMPTY_LIST EMPTY_DICT
"""
_PUSHES = frozenset(_CONSTANTS.split())
"""Operations that put a constant or an empty container on the stack. Python's pickler writes no others since 3.8 (protocol 4)."""
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_SETS = {"APPEND": 1, "SETITEM": 2}
_NO_PICKLE_CHARACTERS = 8
"""A string of so few characters is no pickle that calls a function. ``bfloat16`` can be read as base64."""
_MARK, _VALUE, _OBJECT = object(), object(), object()


class _RefusedError(Exception):
    """The pickle has something that no handle has. The message says what."""


def find_problem(payload: object) -> str:
    """Return why SGLang must not unpickle an item of ``serialized_named_tensors``; empty if it has handles of tensors only."""
    try:
        if not isinstance(payload, str):
            raise _RefusedError("has an item that is no string")
        _check(_decode(payload))
    except _RefusedError as error:
        return f"serialized_named_tensors {error}. It may hold handles of tensors only."
    return ""


def _decode(text: str) -> bytes:
    """Return the bytes of a base64 string. Refuse strings that decoders could read differently."""
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        raise _RefusedError("has an item that is not base64") from None
    if base64.b64encode(data) != text.encode():
        raise _RefusedError("has an item that is not in the usual form of base64")
    return data


def _check(data: bytes, *, is_nested: bool = False) -> None:
    pickle = _Pickle()
    try:
        for operation, argument, _ in pickletools.genops(data):
            pickle.follow(operation.name, argument)
    except (ValueError, IndexError):
        raise _RefusedError("has an item that is no complete pickle") from None
    if not pickle.names & _NESTED:
        return
    if is_nested:
        raise _RefusedError("has LocalSerializedTensor inside of LocalSerializedTensor")
    for constant in pickle.constants:
        if isinstance(constant, bytes):
            _check(constant, is_nested=True)
        elif len(constant) > _NO_PICKLE_CHARACTERS and _is_base64(constant):
            _check(_decode(constant), is_nested=True)


def _is_base64(text: str) -> bool:
    try:
        base64.b64decode(text, validate=True)
    except ValueError:
        return False
    return True


class _Pickle:
    """The stack and the memo of a pickle, with names and constants as they are, and placeholders for all else."""

    def __init__(self) -> None:
        self.names: set[tuple[str, str]] = set()
        self.constants: list[str | bytes] = []
        self._stack: list[object] = []
        self._memo: list[object] = []

    def follow(self, operation: str, argument: Any) -> None:  # noqa: PLR0912 - one case per operation
        """Carry out one operation. Raises _RefusedError, or IndexError if the stack or the memo is too short."""
        stack, memo = self._stack, self._memo
        match operation:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "MARK":
                stack.append(_MARK)
            case "MEMOIZE":
                memo.append(stack[-1])
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                self._push_name(module, name)
            case "REDUCE":
                stack.pop()
                self._pop_name(_FUNCTIONS, "calls")
                stack.append(_VALUE)
            case "NEWOBJ":
                stack.pop()
                self._pop_name(_CLASSES, "makes objects of")
                stack.append(_OBJECT)
            case "BUILD":
                stack.pop()
                if stack[-1] is not _OBJECT:
                    raise _RefusedError("sets attributes of something that it has not made")
            case "TUPLE":
                self._pop_to_mark()
                stack.append(_VALUE)
            case "APPENDS" | "SETITEMS":
                self._pop_to_mark()
            case _ if operation in _TUPLES:
                del stack[-_TUPLES[operation] :]
                stack.append(_VALUE)
            case _ if operation in _SETS:
                del stack[-_SETS[operation] :]
            case _ if operation in _PUSHES:
                stack.append(argument)
                if isinstance(argument, str | bytes):
                    self.constants.append(argument)
            case _:
                raise _RefusedError(f"has the operation {operation} of pickle")

    def _push_name(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise _RefusedError("computes a name")
        if (module, name) not in _NAMES:
            raise _RefusedError(f"names {module[:100]}.{name[:100]}")
        self.names.add((module, name))
        self._stack.append((module, name))

    def _pop_name(self, allowed: frozenset[tuple[str, str]], verb: str) -> None:
        found = self._stack.pop()
        if found not in allowed:
            raise _RefusedError(f"{verb} {'.'.join(found) if isinstance(found, tuple) else 'a value'}")

    def _pop_to_mark(self) -> None:
        while self._stack.pop() is not _MARK:
            pass
