"""Coordinator → its next life, and the operator: what is persisted of a fleet."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from sglang_rollout.wire.message import Message
from sglang_rollout.wire.ports import WIRE_VERSION
from sglang_rollout.wire.reasons import GateReason
from sglang_rollout.wire.states import FleetState
from sglang_rollout.wire.weights import EngineState, Version


class EngineRow(Message):
    """One engine in the record and in the discovery document."""

    name: str
    state: EngineState
    version: Version | None
    boot_id: str | None
    gate_open: bool
    reason: GateReason | None = None
    """Why the gate is closed; None while it is open."""
    message: str = ""
    """The reason as a sentence; empty while the gate is open."""
    released: list[str] = Field(default_factory=list)
    """Memory that it has given back: ``weights``, ``kv_cache``, ``cuda_graph``."""
    comparing: bool = False
    """What it released is back in memory, and what it holds now is to be compared with what the fleet serves."""
    all_reduce: float | None = None
    """GB/s that its ranks reached before the start; None: not measured."""


class Adapter(Message):
    """An adapter (LoRA) that every engine should load."""

    name: str
    path: str
    pinned: bool = False
    """True if SGLang must never evict the adapter from the slots of running adapters."""


class AdapterRow(Adapter):
    """One adapter in the record."""

    by_spec: bool
    """Not loaded by a trainer's call."""
    loaded: int
    """Engines that hold it."""
    wanted: int
    """Engines that should."""
    reason: str = ""
    """What an engine said that could not load or unload it."""


class UpdateOutcome(StrEnum):
    """How the last weight update ended."""

    COMMITTED = "Committed"
    PARTIAL = "Partial"
    """Some engines hold the new version, the others are fenced."""
    FAILED = "Failed"
    """No engine holds the new version; the old one stays committed."""
    ABORTED = "Aborted"
    """It was given up before any engine was told, while the fleet was paused: nothing has changed."""


class LastUpdate(Message):
    """The last weight update that ended."""

    version: Version
    outcome: UpdateOutcome
    reason: str = ""
    finished: str
    """RFC 3339, UTC."""
    phases_ms: dict[str, int] = Field(default_factory=dict)
    """Milliseconds per phase: pause, transfer, commit, resume, total."""
    engines: list[str] = Field(default_factory=list)
    """The engines that committed."""


class Noted(Message):
    """What one life of an engine was started with."""

    boot_id: str
    checksums: tuple[str, ...]
    """Of its ranks."""


class _Group(Message):
    name: str
    epoch: int
    world_size: int
    master: str
    backend: str


class FleetGroup(_Group):
    """A weight-update group that is open now."""

    members: list[str]


class GroupRow(_Group):
    """The same in the record, which may have to hold many groups of many engines."""

    places: list[int]
    """Where its members are among the record's engines, in rank order."""


class OnDisk(Message):
    """A version that the fleet loaded from a shared volume."""

    version: Version
    path: str
    digest: str | None
    """What tells the folder's contents from others."""


class Tensors(Message):
    """A set of tensors, without their names: a model may have 50,000."""

    count: int
    digest: str
    """SHA-256 of the sorted names, one a line."""


class Record(Message):
    """What the coordinator persists: ConfigMap ``<name>-weights``, key ``weights.json``. One writer: the coordinator."""

    wire: int = WIRE_VERSION
    term: int
    epoch: int
    committed: Version
    intent_generation: int = 0
    """Generation of the intent that has been acted on: the coordinator's acknowledgement."""
    engines: list[EngineRow] = Field(default_factory=list)
    joined: list[GroupRow] = Field(default_factory=list)
    """Groups that are open, so that a restarted coordinator can go on with those whose members all still live."""
    last_update: LastUpdate | None = None
    history: list[Version] = Field(default_factory=list)
    """Versions of this run, oldest first, that may be served: the committed one and those that the policy tolerates."""
    burned: Version | None = None
    """The newest version that was given up after some engine may have taken it: its number never names other weights."""
    under_way: Version | None = None
    """What the update becomes that was open; None: none was. If it commits while the store is away, only engines can tell."""
    next_run: int = 0
    """The run that the next update opens, if somebody asked for a new one."""
    fleet_id: str = ""
    """Made once with the first record: versions of a fleet made anew under the old name are other versions."""
    world_size: int = 0
    """Of a group opened now."""
    state: FleetState = FleetState.ACTIVE
    """What of the intent's state is in effect."""
    waits_for_trainer: bool = False
    """Its trainer is lost, and the fleet is paused until one calls (``weights.trainerLease.onLoss``)."""
    checksums: dict[int, tuple[str, ...]] = Field(default_factory=dict)
    """Of the committed version, by the number of an engine's ranks, as far as they are known."""
    disk: OnDisk | None = None
    """Where the committed version was loaded from, if it was."""
    adapters: list[AdapterRow] = Field(default_factory=list)
    tensors: Tensors | None = None
    """What updates have brought since ``model.path``; None: written by a release before, or nothing yet."""
    tried: str = ""
    """What engines may hold besides from updates that failed: marks of the tensors' names, base64."""
    sources: list[str] = Field(default_factory=list)
    """Groups that brought the last committed tensors: an update that ends without one of them is not complete."""
    lent: list[str] | None = None
    """Memory of the engines that the trainer has; None: the engines share their GPUs with nobody."""
    lent_apart: dict[str, list[str]] = Field(default_factory=dict)
    """The same of engines at whose own URL the trainer has said something else since."""
    noted: dict[str, Noted] = Field(default_factory=dict)
    """Where nobody sends weights: what each engine holds, as it said before its first sleep."""

    def members(self, group: GroupRow) -> list[EngineRow]:
        """The engines of one of its groups, in rank order."""
        return [self.engines[place] for place in group.places]

    @property
    def lends(self) -> bool:
        """Whether the trainer has memory of any engine."""
        return bool(self.lent) or any(self.lent_apart.values())
