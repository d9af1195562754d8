"""Weight versions, and the state of an engine's weights."""

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
    """Label that SGLang reports as ``weight_version`` in ``/model_info`` and in every sample's ``meta_info``."""

    @property
    def is_base(self) -> bool:
        """True if ``model.path`` contains this version."""
        return self.run == 0

    def __str__(self) -> str:
        return BASE_LABEL if self.is_base else f"{self.run}/{self.step}"


BASE = Version(run=0, step=0, label=BASE_LABEL)
"""Version of a fleet that no trainer has updated yet."""


class EngineState(StrEnum):
    """State of an engine's weights. The gate may be open only for ``clean`` at the committed version."""

    CLEAN = "clean"
    """All tensors belong to one known version."""
    DIRTY = "dirty"
    """A mixture of versions: an update began on the engine and was not completed."""
    UNKNOWN = "unknown"
    """The engine is not up, or the version of its weights is not known."""
