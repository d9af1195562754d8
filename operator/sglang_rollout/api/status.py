"""``status`` of an SGLangRollout: what the operator reports."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from sglang_rollout.api.schema import ApiModel

MAX_ENGINE_ROWS = 64
"""Engines listed one by one; a bigger fleet shows all of its members at ``GET /fleet``."""

MAX_ADAPTERS = 128
MAX_ADAPTER_NAME = 256
MAX_ADAPTER_PATH = 4096
MAX_AVOIDED_NODES = 64
MAX_NODE_FAILURES = 128

Text = Annotated[str, Field(max_length=32768)]


class Condition(ApiModel):
    """One aspect of the fleet's state, in the usual Kubernetes form."""

    type: str = Field(max_length=64)
    """Which aspect."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: str = Field(max_length=64)
    """Why, as a constant for programs."""
    message: Text = ""
    """Why, as a sentence for people."""
    observed_generation: int | None = None
    """`metadata.generation` that this was said about."""
    last_transition_time: str = Field(json_schema_extra={"format": "date-time"})
    """When `status` last changed."""


class EnginePhase(StrEnum):
    """Where an engine is in its life."""

    PENDING = "Pending"
    STARTING = "Starting"
    FAILED = "Failed"
    WAITING = "Waiting"
    UPDATING = "Updating"
    SERVING = "Serving"
    PAUSED = "Paused"
    ASLEEP = "Asleep"
    STOPPING = "Stopping"


class EngineStatus(ApiModel):
    """One engine."""

    name: str = Field(max_length=63)
    """Its StatefulSet."""
    phase: EnginePhase
    """`Pending` (no node or image yet), `Starting` (loads the model), `Failed`, `Waiting` (up, but without the
    committed weights, so it serves nobody), `Updating` (a weight update is under way on it), `Serving`, `Paused` (by
    `spec.state`), `Asleep` (by `spec.state`, or because its trainer has the memory), `Stopping`."""
    updated: bool
    """Whether its pods were made from the current spec."""
    version: str | None = Field(default=None, max_length=256)
    """Weight version that all of its tensors belong to; absent while that is not known."""
    weights: str | None = Field(default=None, max_length=16)
    """`clean`, `dirty` or `unknown`."""
    restarts: int = 0
    """How often the engine containers of its pods were restarted."""
    node: str | None = Field(default=None, max_length=253)
    """The node it runs on; of an engine with several pods, the one of pod 0."""
    port: int | None = None
    """Port of its gate on the node, with `engine.network.hostNetwork`."""
    nodes: list[Annotated[str, Field(max_length=253)]] | None = Field(default=None, max_length=64)
    """The nodes of all its pods by rank, if it has several; empty for a pod without one."""
    all_reduce: float | None = Field(default=None, alias="allReduceGBps")
    """GB/s that the ranks of its pod reached before the start (`engine.preflight`); of pod 0 if it has several."""
    lost: bool | None = None
    """True from when it did not serve for another reason than an update, a pause, a sleep or the router, until it serves."""
    reason: Text = ""
    """Why it does not serve, as a sentence."""


class LastUpdate(ApiModel):
    """The last weight update that ended."""

    version: str = Field(max_length=256)
    """The version it was about."""
    outcome: str = Field(max_length=32)
    """`Committed`, `Partial`, `Failed` or, of a pause that was given up, `Aborted`."""
    reason: Text = ""
    """Why it failed."""
    finished: str = Field(json_schema_extra={"format": "date-time"})
    """When it ended."""
    phases_ms: dict[str, int] = Field(default_factory=dict, json_schema_extra={"maxProperties": 32})
    """Milliseconds of each phase."""
    engines: int = 0
    """How many engines committed it."""


class WeightsStatus(ApiModel):
    """The policy version of the fleet."""

    committed_version: str = Field(max_length=256)
    """What the fleet serves: `base` (what `model.path` holds) or the trainer's own name of the version."""
    run: int = 0
    """Grows when a trainer starts anew; 0 before the first update."""
    step: int = 0
    """Step of the committed version within the run."""
    epoch: int = 0
    """Grows whenever the set of engines or the life of one of them changes. A trainer's group belongs to one epoch."""
    world_size: int = 0
    """Size of a weight-update group opened now: the trainer and all ranks of the engines that are up."""
    oldest_serving: str | None = Field(default=None, max_length=256)
    """Oldest version that an engine serves; absent while none serves."""
    newest_serving: str | None = Field(default=None, max_length=256)
    """Newest version that an engine serves."""
    skew: int = 0
    """How many commits the oldest serving engine is behind; 0 except with `versionPolicy: MaxStaleness`."""
    stale: int = 0
    """Engines that are up and do not hold the committed version."""
    last_update: LastUpdate | None = None
    """The last weight update that ended."""


class AdapterStatus(ApiModel):
    """One adapter (LoRA)."""

    name: str = Field(max_length=MAX_ADAPTER_NAME)
    """Its name in requests."""
    path: str = Field(max_length=MAX_ADAPTER_PATH)
    """Where engines load it from."""
    loaded: int = 0
    """Engines that hold it."""
    wanted: int = 0
    """Engines that should."""
    reason: Text = ""
    """What an engine said that could not load or unload it."""


class AvoidedNode(ApiModel):
    """A node that new pods of engines do not go to."""

    node: str = Field(max_length=253)
    """Its name."""
    reason: str = Field(max_length=1024)
    """Why, as a sentence."""
    since: str = Field(json_schema_extra={"format": "date-time"})
    """When that was decided."""
    until: str = Field(json_schema_extra={"format": "date-time"})
    """When engines may go there again."""


class NodeFailure(ApiModel):
    """The end of an engine that nobody asked for."""

    node: str = Field(max_length=253)
    """Where."""
    engine: str = Field(max_length=63)
    """Which engine."""
    revision: str = Field(max_length=63)
    """Revision of its pod: what happened to another spec says nothing about this one."""
    time: str = Field(json_schema_extra={"format": "date-time"})
    """When."""
    reason: str = Field(default="", max_length=512)
    """What it said at last."""


class PrefetchStatus(ApiModel):
    """How far `model.prefetch` is."""

    ready: int = 0
    """Nodes that have the files."""
    wanted: int = 0
    """Nodes that are to have them."""
    reason: Text = ""
    """Why a node does not have them, as a sentence."""


class Endpoints(ApiModel):
    """Where trainers find the fleet."""

    url: str = Field(max_length=512)
    """The one URL: generate through it, push weights through it."""
    discovery: str = Field(max_length=512)
    """Discovery document: members, ranks, world size, versions."""


class RolloutStatus(ApiModel):
    """What is."""

    observed_generation: int = 0
    """`metadata.generation` that this status was made from."""
    replicas: int = 0
    """Engines that exist."""
    ready_replicas: int = 0
    """Engines that serve the committed weights."""
    updated_replicas: int = 0
    """Engines whose pod was made from the current spec."""
    ready: str = Field(default="", max_length=32)
    """Engines that serve, of those wanted: `2/2`."""
    base: int | None = None
    """Engines of the base now; absent without `spec.elastic`."""
    selector: str = Field(default="", max_length=512)
    """Label selector of the engine pods, for autoscalers."""
    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """`Ready`, `Available`, `Progressing`, `RouterReady`, `WeightsConsistent`, `WaitingForWeights`, `Degraded`."""
    engines: list[EngineStatus] = Field(
        default_factory=list,
        max_length=MAX_ENGINE_ROWS,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """The engines, those that do not serve first if there are more than 64."""
    weights: WeightsStatus | None = None
    """The policy version; absent until the coordinator has reported."""
    adapters: list[AdapterStatus] = Field(
        default_factory=list,
        max_length=MAX_ADAPTERS,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """Adapters of `engine.lora`, and those that trainers have loaded."""
    avoided_nodes: list[AvoidedNode] | None = Field(
        default=None,
        max_length=MAX_AVOIDED_NODES,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["node"]},
    )
    """Nodes on which engines failed repeatedly (`scheduling.avoidNodes`)."""
    node_failures: list[NodeFailure] | None = Field(default=None, max_length=MAX_NODE_FAILURES)
    """Failures of engines that count towards avoiding their node; absent without `scheduling.avoidNodes`."""
    prefetch: PrefetchStatus | None = None
    """How far `model.prefetch` is; absent without it."""
    endpoints: Endpoints | None = None
    """Where trainers find the fleet."""
