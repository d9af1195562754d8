"""Fleet → trainer: the discovery document, and the shape of every answer to a control call."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from sglang_rollout.wire.agent import Nccl
from sglang_rollout.wire.message import Message
from sglang_rollout.wire.ports import WIRE_VERSION
from sglang_rollout.wire.record import AdapterRow, EngineRow, FleetGroup, LastUpdate
from sglang_rollout.wire.states import FleetState
from sglang_rollout.wire.weights import Version


class FleetMember(EngineRow):
    """One engine in the discovery document."""

    url: str
    tensor_size: int
    rank_offset: int | None
    """First rank of this engine in a group opened now; None: the engine would not take part, and ``message`` says why."""
    routed: bool
    """smg has it in its list."""
    sglang_version: str | None = None
    nccl: Nccl | None = None
    """A trainer needs the same version, and the same ``NCCL_CUMEM_ENABLE``."""


class FleetDocument(Message):
    """``GET /fleet``: everything a trainer or a person needs to know."""

    wire: int = WIRE_VERSION
    name: str
    namespace: str
    term: int
    epoch: int
    """Grows whenever the set of members or any member's boot id changes. A group belongs to one epoch."""
    world_size: int
    """For a group opened now: 1 (trainer, rank 0) + the tensor sizes of all members."""
    backend: str
    fleet_id: str = ""
    """Tells this fleet's versions from those of another that had the same name."""
    lease: float = 20.0
    """Seconds within which a trainer should send the next heartbeat (``POST /fleet/lease``) while it holds a group."""
    committed: Version
    serving: int
    """Engines with an open gate."""
    members: list[FleetMember]
    groups: list[FleetGroup] = Field(default_factory=list)
    phase: str = "idle"
    """Phase of the update that runs now, or ``idle``."""
    last_update: LastUpdate | None = None
    urls: dict[str, str] = Field(default_factory=dict)
    adapters: list[AdapterRow] = Field(default_factory=list)
    state: FleetState = FleetState.ACTIVE
    """What ``spec.state`` holds the fleet in now."""
    held: str = ""
    """Why nothing generates although all is well, as a sentence: what holds the fleet, and until when."""


class ModelTensors(Message):
    """``GET /fleet/tensors``: the model that the engines were started with, as the pod of one engine reads it."""

    engine: str
    """Name of the engine whose pod read the model."""
    shapes: dict[str, list[int] | None]
    """Shape of each tensor in the checkpoint, by name; None: its values are packed, so that the shape tells nothing."""


class ControlReply(BaseModel):
    """SGLang's own shape for control calls, with our particulars beside it. SGLang's clients read ``success`` and ``message``."""

    success: bool
    message: str
    fleet: dict[str, Any] | None = None
    """Per-engine results, and on refusals what would be right (``epoch``, ``world_size``, ``members``)."""
