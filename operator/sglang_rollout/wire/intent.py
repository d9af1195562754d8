"""Operator → coordinator: the engines and adapters that a fleet should have."""

from __future__ import annotations

from pydantic import Field

from sglang_rollout.wire.message import Message
from sglang_rollout.wire.policy import WeightsPolicy
from sglang_rollout.wire.states import FleetMode, FleetState


class WantedEngine(Message):
    """One engine the fleet should have."""

    name: str
    """Name of the engine: its StatefulSet in Kubernetes (``<rollout>-engine-<i>``)."""
    tensor_size: int | None = Field(default=1, ge=1)
    """Tensor-parallel ranks of the engine; so many consecutive ranks it takes in a trainer's group. None: as many as the engine reports."""
    url: str | None = None
    """Base URL of its gate. None: found by the engine's EndpointSlice hostname ``<name>-0`` (Kubernetes)."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port of its gate at that address. None: the one that all gates have whose pods have a network of their own."""


class Adapter(Message):
    """An adapter (LoRA) that every engine should hold."""

    name: str
    path: str
    pinned: bool = False
    """SGLang never evicts a pinned adapter from the slots of running adapters."""


class Intent(Message):
    """What the operator wants of the coordinator: ConfigMap ``<name>-intent``, key ``intent.json``. One writer: the operator."""

    generation: int
    """``metadata.generation`` of the SGLangRollout that this was made from."""
    name: str
    namespace: str
    engines: list[WantedEngine]
    base: int | None = Field(default=None, ge=0)
    """A fleet that has never taken weights waits for so many engines. None: for all."""
    weights: WeightsPolicy = WeightsPolicy()
    state: FleetState = FleetState.ACTIVE
    """What ``spec.state`` asks of the engines."""
    drain: float = 300.0
    """Requests have so many seconds to end before an engine falls asleep."""
    adapters: list[Adapter] | None = None
    """Adapters of the spec. None: engines take no adapters, or nobody but trainers says which."""
    mode: FleetMode | None = None
    """None: the engines have GPUs of their own and take weights."""
    data_paths_url: str | None = None
