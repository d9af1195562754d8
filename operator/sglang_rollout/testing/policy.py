"""The policy of a stand-in: the tensors that it holds, as bytes, and the tokens that follow from them. Without torch.

A tensor's bytes are immutable and replaced as a whole. So engines of one process can share the base weights, but never a change.

The next token is a pure function of the bytes of all tensors and of the previous tokens:

    context 0   = SHA-256(prompt IDs, 4 bytes each, little endian)
    token i     = 3 + (first 8 bytes of SHA-256(policy digest + context i), big endian) mod (vocabulary - 3)
    context i+1 = SHA-256(context i + token i, 4 bytes)

The policy digest covers names, types, shapes and bytes of all tensors, so one changed bit changes all tokens. Sampling parameters, for
example the temperature, change nothing. Tokens 0 to 2 are never generated, because they are the usual padding, start and end.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

ITEM_SIZES = {
    "bool": 1, "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "float32": 4,
    "int64": 8, "float64": 8,
}  # fmt: skip
"""Bytes per element, by torch's names of the types."""


@dataclass(frozen=True)
class Held:
    """One tensor: its contiguous bytes, row by row."""

    dtype: str
    """Without ``torch.``: ``bfloat16``."""
    shape: tuple[int, ...]
    data: bytes

    @cached_property
    def checksum(self) -> str:
        """Checksum of SGLang's weights_checker on a CPU: the first 8 bytes of SHA-256 over the tensor's bytes, in hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()[:16]

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over type, shape and bytes."""
        return hashlib.sha256(f"{self.dtype}{list(self.shape)}".encode() + self.data).digest()


class Weights:
    """Named tensors. Digests are computed lazily, and only for tensors that changed."""

    def __init__(self, tensors: Mapping[str, Held]) -> None:
        self._tensors = dict(tensors)
        self._policy: bytes | None = None

    def __getitem__(self, name: str) -> Held:
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def put(self, name: str, held: Held) -> None:
        """Replace one tensor."""
        self._tensors[name] = held
        self._policy = None

    def lose(self) -> None:
        """Overwrite all tensors with zeros, as released memory loses its contents."""
        for name, held in self._tensors.items():
            self.put(name, Held(held.dtype, held.shape, bytes(len(held.data))))

    @property
    def policy(self) -> bytes:
        """SHA-256 over all names and tensors, which determines the tokens."""
        if self._policy is None:
            self._policy = policy_digest(self._tensors)
        return self._policy

    def checksums(self) -> dict[str, str]:
        """Return each tensor's checksum, as weights_checker lists them."""
        return {name: held.checksum for name, held in self._tensors.items()}

    def copy(self) -> Weights:
        """Return an independent copy."""
        return Weights(self._tensors)


def policy_digest(tensors: Mapping[str, Held]) -> bytes:
    """Return the SHA-256 over the sorted names, each with its tensor's digest."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(name.encode() + b"\0" + tensors[name].digest)
    return whole.digest()


def overall_checksum(checksums: Mapping[str, str]) -> str:
    """Return SGLang's ``per_gpu_checksum``: SHA-256 over the sorted names and checksums."""
    whole = hashlib.sha256()
    for name in sorted(checksums):
        whole.update(name.encode() + checksums[name].encode())
    return whole.hexdigest()


def held_from(state: Mapping[str, Any]) -> dict[str, Held]:
    """Convert a state dict of torch tensors, numpy arrays or ``Held``. Tensors on a GPU are copied to the host."""
    return {name: tensor if isinstance(tensor, Held) else _held(tensor) for name, tensor in state.items()}


def _held(tensor: Any) -> Held:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if hasattr(tensor, "detach"):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        # numpy has no bfloat16, but every type can be looked at as bytes; ``byte()`` names the type without importing torch here.
        data = flat.view(flat.new_empty(0).byte().dtype).numpy().tobytes()
    else:
        data = tensor.tobytes()
    return Held(dtype, tuple(tensor.shape), data)


DEFAULT_SHAPES = {
    "model.embed_tokens.weight": (64, 16),
    "model.layers.0.self_attn.q_proj.weight": (16, 16),
    "model.layers.0.mlp.down_proj.weight": (16, 32),
    "model.norm.weight": (16,),
    "lm_head.weight": (64, 16),
}
"""The default model, float32: 11 KB, names as in a checkpoint of a Llama."""


def default_state() -> dict[str, Held]:
    """Return the base weights of a stand-in without a model folder: the same in every process, values between -1 and 1."""
    return {name: Held("float32", shape, _values(name, prod(shape))) for name, shape in DEFAULT_SHAPES.items()}


def _values(name: str, count: int) -> bytes:
    """Return finite float32 numbers: random fractions with the exponent of numbers between 0.5 and 1, and a random sign."""
    raw = bytearray(hashlib.shake_256(name.encode()).digest(count * 4))
    for last in range(3, len(raw), 4):  # little endian: sign and high exponent bits are in the last byte
        raw[last] = raw[last] & 0x80 | 0x3F
        raw[last - 1] &= 0x7F
    return bytes(raw)


_TYPES = {
    "BOOL": "bool", "I8": "int8", "U8": "uint8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I16": "int16", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "F32": "float32", "I64": "int64", "F64": "float64",
}  # fmt: skip


class Incomplete(Exception):
    """A file that is not a complete safetensors file."""


def read_folder(folder: Path) -> dict[str, Held]:
    """Read all ``*.safetensors`` of a folder. Raises FileNotFoundError if there is none, Incomplete if one is cut off."""
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not folder.is_dir():
        raise FileNotFoundError(f"Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{folder}'.")
    if not files:
        raise FileNotFoundError(f"Cannot find any model weights with `{folder}`")
    tensors: dict[str, Held] = {}
    for file in files:
        tensors.update(read_file(file))
    return tensors


def read_file(file: Path) -> dict[str, Held]:
    """Read the tensors of one file: 8 bytes length, a JSON header, the bytes."""
    data = file.read_bytes()
    try:
        (length,) = struct.unpack("<Q", data[:8])
        header: dict[str, Any] = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        found = {}
        for name, entry in header.items():
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            if end > len(data):
                raise Incomplete(f"{file} ends at byte {len(data)}, and tensor {name} at {end}")
            found[name] = Held(_TYPES[entry["dtype"]], tuple(entry["shape"]), data[start:end])
    except (struct.error, ValueError, KeyError) as error:
        raise Incomplete(f"{file} is no safetensors file: {error}") from error
    return found


VOCABULARY = 2048
"""Token IDs are below this number."""
_SPECIAL = 3


def start(prompt: Sequence[int]) -> bytes:
    """Return the context of a prompt."""
    return hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in prompt)).digest()


def next_token(policy: bytes, context: bytes, vocabulary: int = VOCABULARY) -> int:
    """Return the token that follows a context under a policy."""
    number = int.from_bytes(hashlib.sha256(policy + context).digest()[:8], "big")
    return _SPECIAL + number % (vocabulary - _SPECIAL)


def advance(context: bytes, token: int) -> bytes:
    """Return the context after one more token."""
    return hashlib.sha256(context + token.to_bytes(4, "little")).digest()


def logprob(policy: bytes, context: bytes) -> float:
    """Return a log-probability for ``return_logprob``: between -8 and 0, and as deterministic as the token."""
    return -8.0 * hashlib.sha256(b"logprob" + policy + context).digest()[0] / 256


def expected_tokens(
    state_dict: Mapping[str, Any], prompt_ids: Sequence[int], max_new_tokens: int, *, vocabulary: int = VOCABULARY
) -> list[int]:
    """Return the tokens that a stand-in generates if it holds exactly these tensors.

    A test can prove with it which version answered, whatever the reply claims.

    Args:
        state_dict: All tensors of the model (torch tensors, numpy arrays or ``Held``), in the types that the engine holds.
        prompt_ids: Token IDs of the prompt.
        max_new_tokens: Number of tokens to generate.
        vocabulary: Token IDs are below this number.
    """
    policy = policy_digest(held_from(state_dict))
    context, tokens = start(prompt_ids), []
    for _ in range(max_new_tokens):
        tokens.append(next_token(policy, context, vocabulary))
        context = advance(context, tokens[-1])
    return tokens


def encode(text: str, vocabulary: int = VOCABULARY) -> list[int]:
    """Return the token IDs of a text: `` t17`` is token 17, any other word gets an ID from its hash."""
    return [_id(word, vocabulary) for word in text.split()]


def decode(tokens: Sequence[int]) -> str:
    """Return a text that encodes to these tokens."""
    return "".join(f" t{token}" for token in tokens)


def _id(word: str, vocabulary: int) -> int:
    named = re.fullmatch(r"t(\d{1,9})", word)
    if named and int(named[1]) < vocabulary:
        return int(named[1])
    return _SPECIAL + int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big") % (vocabulary - _SPECIAL)
