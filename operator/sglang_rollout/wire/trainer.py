"""Messages from the coordinator to trainers: the discovery document, and the answer to control calls."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from sglang_rollout.wire import Message
from sglang_rollout.wire.agent import Nccl
from sglang_rollout.wire.ports import WIRE_VERSION
from sglang_rollout.wire.record import AdapterRow, EndedUpdate, EngineRow, FleetGroup
from sglang_rollout.wire.states import FleetState, SnapshotsState, StagedCopy, Version

TRANSPORT_STAGED = "Staged"
"""Value of :attr:`FleetDocument.transport`: the fleet takes uploads (``POST /fleet/updates``)."""


class FleetMember(EngineRow):
    """One engine in the discovery document."""

    url: str
    """URL of the engine's gate."""
    tensor_size: int
    """Tensor-parallel ranks."""
    rank_offset: int | None
    """First rank of the engine in a process group opened now; None if the engine would not take part (``message`` says why)."""
    routed: bool
    """smg lists the engine as a worker."""
    sglang_version: str | None = None
    """Version of SGLang; None while it is not known."""
    nccl: Nccl | None = None
    """NCCL of the engine. A trainer needs the same version, and the same ``NCCL_CUMEM_ENABLE``."""
    updates_refused: str = ""
    """Why SGLang refuses updates of the weights in the engine, in its own sentences; empty if it does not, or if nothing is known."""
    staged: list[StagedCopy] = Field(default_factory=list)
    """Versions in the memory of the engine's pod (transport Staged); without ``digest`` while they arrive."""


class StoreRow(Message):
    """The weight store in the discovery document."""

    up: bool
    """The store answers the coordinator."""
    instance: str | None
    """Identifies one run of the store's process; None while it is not known."""
    copies: list[StagedCopy] = Field(default_factory=list)
    """Versions that it holds; without ``digest`` while they arrive."""
    snapshots: SnapshotsState | None = None
    """Its snapshots; None: it writes none (``weights.store.snapshots``)."""
    message: str = ""
    """Why it could not get the committed version from the agents or from a snapshot, as a sentence; empty if nothing failed."""


class FleetDocument(Message):
    """``GET /fleet``: state of the fleet for trainers and people."""

    wire: int = WIRE_VERSION
    """Version of the format."""
    name: str
    """Name of the rollout."""
    namespace: str
    """Namespace of the rollout."""
    term: int
    """Term of the coordinator."""
    epoch: int
    """Grows when an engine joins, leaves or restarts."""
    world_size: int
    """World size of a process group opened now: the trainer and all ranks of the engines that take part; 2 with transport Staged."""
    backend: str
    """Backend of the process group if the trainer names none."""
    transport: str = "Distributed"
    """``spec.weights.transport``: ``Distributed``, ``Disk`` or ``Staged``."""
    fleet_id: str = ""
    """Identifies the fleet: distinguishes its versions from those of an earlier fleet with the same name."""
    lease: float = 20.0
    """Seconds within which a trainer with an open process group should send its next heartbeat (``POST /fleet/lease``)."""
    committed: Version
    """Version that the fleet serves: ``run``, ``step`` and ``label``."""
    serving: int
    """Engines that requests at the URL reach: the gate is open, and smg sends requests to the engine."""
    members: list[FleetMember]
    """All engines, also those that do not take part."""
    groups: list[FleetGroup] = Field(default_factory=list)
    """Open process groups."""
    phase: str = "idle"
    """Phase of the current update, or ``idle``."""
    last_update: EndedUpdate | None = None
    """The last update that ended."""
    urls: dict[str, str] = Field(default_factory=dict)
    """URLs of the fleet: ``control`` serves all calls, ``data`` at least requests for tokens."""
    adapters: list[AdapterRow] = Field(default_factory=list)
    """Adapters (LoRA), and the engines that have loaded them."""
    state: FleetState = FleetState.ACTIVE
    """Applied ``spec.state``."""
    held: str = ""
    """Interruption that keeps the engines from serving, as a sentence; empty if there is none."""
    pause_deferred: bool = False
    """True while a trainer has paused the fleet and engines generate (``weights.staging.trainerPause: Defer``)."""
    update: str | None = None
    """ID of the open update, with transport Staged; null: none is open."""
    sampling_params: list[str] = Field(default_factory=list)
    """Names that a request may set in ``sampling_params``: those that every engine knows and that reach the engines. Empty: not known."""
    store: StoreRow | None = None
    """The weight store; null: the transport is not Staged."""


class ModelTensors(Message):
    """``GET /fleet/tensors``: tensors of the model that the engines were started with, read by the pod of one engine."""

    engine: str
    """Name of the engine whose pod read the model."""
    shapes: dict[str, list[int] | None]
    """Shape of each tensor in the checkpoint by name; None if its values are packed."""


class ControlReply(BaseModel):
    """Answer to a control call: SGLang's fields ``success`` and ``message``, and details of the fleet."""

    success: bool
    message: str
    code: str | None = None
    """Why the call was refused before anything was done, for programs; None: it was carried out, and succeeded or failed."""
    fleet: dict[str, Any] | None = None
    """Results by engine; for a refusal, the valid values (``epoch``, ``world_size``, ``members``)."""
