"""Weight versions, and the states of engines and fleets."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from sglang_rollout.wire import Message

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


class StagedCopy(Message):
    """A version in the memory of a weight store or of an engine pod."""

    update: str
    """ID of the update that sent it."""
    version: Version | None = None
    bytes: int = 0
    """Bytes that have arrived."""
    digest: str = ""
    """Digest of the version once it is complete; empty before."""
    transferred: int = 0
    """Bytes that were sent to the process for it; fewer than ``bytes`` if differences were sent."""
    received: int = 0
    """Bytes that the process has read for it, also those of unfinished and repeated pieces. While it grows, the sender lives."""


class Snapshot(Message):
    """A version on the volume of the weight store's snapshots."""

    update: str
    """ID of the update that sent it."""
    version: Version
    digest: str
    """Digest of the version."""
    bytes: int
    """Bytes of all tensors."""
    author: str = ""
    """Caller that pushed it; empty: not known."""
    created: str = ""
    """When it was written: RFC 3339, UTC."""
    problem: str = ""
    """Why the snapshot cannot be used, as a sentence; empty if no problem is known."""


class SnapshotsState(Message):
    """The snapshots of the weight store."""

    snapshots: list[Snapshot] = Field(default_factory=list)
    """All snapshots, oldest first."""
    writing: str = ""
    """ID of the update whose version is being written; empty: none."""
    failures: int = 0
    """Snapshots that could not be written since the store's process started."""
    message: str = ""
    """Why the newest snapshot could not be written, as a sentence; empty if it was written."""

    def find(self, update: str) -> Snapshot | None:
        """Return the usable snapshot of an update; None if there is none."""
        return next((each for each in self.snapshots if each.update == update and not each.problem), None)


class StagedVersion(Message):
    """What identifies the contents of a committed version that came through a weight store."""

    update: str
    """ID of the update that sent it."""
    digest: str
    """Digest of the version (:func:`sglang_rollout.staging.index.version_digest`)."""
    bytes: int
    """Bytes of all tensors."""


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


class FleetState(StrEnum):
    """Values of ``spec.state``, without ``Suspended``: a suspended fleet has no engines."""

    ACTIVE = "active"
    PAUSED = "paused"
    """No engine generates; weight updates are accepted."""
    ASLEEP = "asleep"
    """The engines' memory is released; requests and weight updates are refused."""


class FleetMode(StrEnum):
    """Whose GPUs the fleet shares."""

    HYBRID = "hybrid"
    """The trainer's GPUs. The trainer releases and restores the engines' memory, and pushes weights to each engine."""
    COLOCATED = "colocated"
    """The trainer's GPUs. The engines keep the weights that they were started with."""


KEEPS_WEIGHTS = (
    "This fleet keeps the weights that it was started with (spec.mode: Colocated). Call /resume_memory_occupation and"
    " /release_memory_occupation. A policy that learns needs a fleet with mode Standalone or Hybrid."
)
"""Message of a refused call about weights."""
BY_HANDLES = (
    "This fleet shares the GPUs of its trainer (spec.mode: Hybrid): each engine receives weights at its own URL with"
    " /update_weights_from_tensor. Only a fleet with mode Standalone opens process groups."
)
"""Message of a refused call about a process group."""
RELEASED_TO_TRAINER = (
    "The fleet is asleep: its memory is released to the trainer, which shares the GPUs (spec.mode). No engine generates until the trainer"
    " calls /resume_memory_occupation."
)
"""Message while the trainer has the memory of the engines."""

_SENTENCES = {
    FleetState.ACTIVE: "",
    FleetState.PAUSED: (
        "The fleet is paused by its spec (spec.state: Paused). No engine generates until the state is Active. Weight updates are accepted."
    ),
    FleetState.ASLEEP: (
        "The fleet is asleep by its spec (spec.state: Asleep): the memory of its engines is released. Requests and weight updates are"
        " refused until the state is Active or Paused."
    ),
}


def describe_state(state: FleetState) -> str:
    """Return why the fleet does not generate, and until when; empty for an active fleet."""
    return _SENTENCES[state]
