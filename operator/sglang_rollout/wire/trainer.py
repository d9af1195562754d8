"""Messages from the coordinator to trainers: the discovery document, and the answer to control calls."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from sglang_rollout.wire import Message
from sglang_rollout.wire.agent import Nccl
from sglang_rollout.wire.ports import WIRE_VERSION
from sglang_rollout.wire.record import AdapterRow, EngineRow, FleetGroup, LastUpdate
from sglang_rollout.wire.states import FleetState, Version


class FleetMember(EngineRow):
    """One engine in the discovery document."""

    url: str
    tensor_size: int
    rank_offset: int | None
    """First rank of the engine in a process group opened now; None if the engine would not take part (``message`` says why)."""
    routed: bool
    """smg lists the engine as a worker."""
    sglang_version: str | None = None
    nccl: Nccl | None = None
    """A trainer needs the same version, and the same ``NCCL_CUMEM_ENABLE``."""


class FleetDocument(Message):
    """``GET /fleet``: state of the fleet for trainers and people."""

    wire: int = WIRE_VERSION
    name: str
    namespace: str
    term: int
    epoch: int
    """Grows when the set of members or any member's boot ID changes."""
    world_size: int
    """World size of a process group opened now: 1 (trainer, rank 0) + the tensor sizes of all members."""
    backend: str
    fleet_id: str = ""
    """Identifies the fleet: distinguishes its versions from those of an earlier fleet with the same name."""
    lease: float = 20.0
    """Seconds within which a trainer with an open process group should send its next heartbeat (``POST /fleet/lease``)."""
    committed: Version
    serving: int
    """Engines with an open gate."""
    members: list[FleetMember]
    groups: list[FleetGroup] = Field(default_factory=list)
    phase: str = "idle"
    """Phase of the current update, or ``idle``."""
    last_update: LastUpdate | None = None
    urls: dict[str, str] = Field(default_factory=dict)
    adapters: list[AdapterRow] = Field(default_factory=list)
    state: FleetState = FleetState.ACTIVE
    """Applied ``spec.state``."""
    held: str = ""
    """Interruption that keeps the engines from serving, as a sentence; empty if there is none."""


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
    fleet: dict[str, Any] | None = None
    """Results by engine; for a refusal, the valid values (``epoch``, ``world_size``, ``members``)."""
