"""What the operator asks of the coordinator: engines, adapters, and ``spec.weights`` and ``spec.security`` as the user wrote them."""

from __future__ import annotations

from pydantic import Field

from sglang_rollout.api.security_spec import Security
from sglang_rollout.api.weights_spec import Weights
from sglang_rollout.wire import Message
from sglang_rollout.wire.record import Adapter
from sglang_rollout.wire.states import FleetMode, FleetState


class WantedEngine(Message):
    """One engine that the fleet should have."""

    name: str
    """Name of the engine; in Kubernetes, of its StatefulSet (``<rollout>-engine-<i>``)."""
    tensor_size: int | None = Field(default=1, ge=1)
    """Tensor-parallel ranks of the engine, which are consecutive in a trainer's process group. None: as the engine reports."""
    url: str | None = None
    """Base URL of the engine's gate. None: found by the hostname ``<name>-0`` in an EndpointSlice (Kubernetes)."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the engine's gate. None: the port of every gate whose pod has its own network."""
    data_url: str | None = None
    """Base URL of the agent's data port, for staged versions. None: port ``STAGING_PORT`` of the engine's address."""


class WantedStore(Message):
    """The weight store of a fleet with transport Staged."""

    name: str
    """Its name, from which its credential is derived."""
    url: str
    """Base URL for the coordinator's calls."""
    data_url: str
    """Base URL of its data port."""


class Intent(Message):
    """ConfigMap ``<name>-intent``, key ``intent.json``. Only the operator writes it."""

    generation: int
    """``metadata.generation`` of the rollout that this intent comes from."""
    name: str
    namespace: str
    engines: list[WantedEngine]
    store: WantedStore | None = None
    """The weight store. None: the transport is not Staged."""
    base: int | None = Field(default=None, ge=0)
    """Engines that a fleet without any update waits for. None: all engines."""
    weights: Weights = Weights()
    """``spec.weights``."""
    security: Security = Security()
    """``spec.security``."""
    state: FleetState = FleetState.ACTIVE
    """State that ``spec.state`` asks for."""
    drain: float = 300.0
    """Seconds that requests have to end before an engine sleeps."""
    adapters: list[Adapter] | None = None
    """Adapters of the spec. None: engines load no adapters, or only those that trainers name."""
    mode: FleetMode | None = None
    """None: the engines have their own GPUs and take weights."""
    isolated: bool | None = None
    """True if NetworkPolicies select the engine pods, so that the coordinator checks if they are enforced."""
