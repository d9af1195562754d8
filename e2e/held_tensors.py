"""Weights of a stand-in engine as the client takes them, on machines without torch."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_rollout.testing import Held
from sglang_rollout.testing.policy import default_state


def changed_state(step: int) -> dict[str, Held]:
    """Return the stand-in's base weights with the lowest byte of each element changed."""

    def change(data: bytes) -> bytes:
        new = bytearray(data)
        new[::4] = bytes((byte + step) % 256 for byte in new[::4])
        return bytes(new)

    return {name: Held(held.dtype, held.shape, change(held.data)) for name, held in default_state().items()}


@dataclass
class HeldTensor:
    """What an upload reads of a tensor."""

    held: Held

    @property
    def dtype(self) -> str:
        """Name of the data type in torch."""
        return f"torch.{self.held.dtype}"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self.held.shape

    def element_size(self) -> int:
        """Return the bytes of an element: a stand-in has FP32 only."""
        return 4

    def read(self) -> memoryview:
        """Return the bytes."""
        return memoryview(self.held.data)


def held_tensors(step: int) -> dict[str, HeldTensor]:
    """Return :func:`changed_state` for an upload."""
    return {name: HeldTensor(held) for name, held in changed_state(step).items()}
