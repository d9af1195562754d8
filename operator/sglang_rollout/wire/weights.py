"""What an engine's weights are: their version, and what is known about them."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from sglang_rollout.wire.message import Message

BASE_LABEL = "base"


class Version(Message):
    """A weight version of the fleet: ``step`` grows within a ``run``; ``label`` is the trainer's own name for it.

    ``run`` 0, ``step`` 0 is *base*: what ``model.path`` holds, before the first update.
    """

    run: int = Field(ge=0)
    step: int = Field(ge=0)
    label: str
    """What SGLang reports as ``weight_version`` in ``/model_info`` and in every sample's ``meta_info``."""

    @property
    def is_base(self) -> bool:
        """Whether this is what ``model.path`` holds."""
        return self.run == 0

    def __str__(self) -> str:
        return BASE_LABEL if self.is_base else f"{self.run}/{self.step}"


BASE = Version(run=0, step=0, label=BASE_LABEL)
"""The version of a fleet that no trainer has updated yet."""


class EngineState(StrEnum):
    """What is known about the weights of one engine. Only ``clean`` at the committed version may have an open gate."""

    CLEAN = "clean"
    """All tensors belong to one version, which is named beside it."""
    DIRTY = "dirty"
    """A mixture: the engine was told of an update that has not been completed."""
    UNKNOWN = "unknown"
    """Not up, or up but nothing could be proved yet."""
