"""``status`` of an SGLangRollout, and the types and reasons of its conditions. Pure.

The operator writes the status. Programs compare ``reason``, a code; ``message`` is a sentence for people.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from sglang_rollout.api.schema import ApiModel, map_list
from sglang_rollout.wire.record import MAX_RECENT_CHARACTERS, MAX_RECENT_UPDATES

MAX_ENGINE_ROWS = 64
"""Engines that status lists. ``GET /fleet`` lists all of them."""

MAX_AUTHOR = 768
MAX_ADAPTERS = 128
MAX_ADAPTER_NAME = 256
MAX_ADAPTER_PATH = 4096
MAX_AVOIDED_NODES = 64
MAX_NODE_FAILURES = 128

Code = Annotated[str, Field(max_length=64)]
"""A constant in CamelCase that programs may compare."""
Text = Annotated[str, Field(max_length=32768)]


class Condition(ApiModel):
    """One aspect of the fleet's state, as a Kubernetes condition."""

    type: str = Field(max_length=64)
    """The aspect."""
    status: Literal["True", "False", "Unknown"]
    """`True`, `False` or `Unknown`."""
    reason: Code
    """Why, as a CamelCase code."""
    message: Text = ""
    """Why, as a sentence."""
    observed_generation: int | None = None
    """`metadata.generation` that the condition describes."""
    last_transition_time: str = Field(json_schema_extra={"format": "date-time"})
    """When `status` last changed."""


class EnginePhase(StrEnum):
    """Phase of an engine."""

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
    """Name of the engine and of its StatefulSet."""
    phase: EnginePhase
    """`Pending` (no node or image yet), `Starting` (loads the model), `Failed`, `Waiting` (up, but without the committed
    weights, so it does not serve), `Updating` (in a weight update), `Serving`, `Paused` (by `spec.state`), `Asleep` (by
    `spec.state`, or because its trainer uses the memory), `Stopping`."""
    updated: bool
    """True if its pods were created from the current spec, and since the last `kubectl rollout restart`."""
    version: str | None = Field(default=None, max_length=256)
    """Weight version of all its tensors; absent while the version is not known."""
    weights: str | None = Field(default=None, max_length=16)
    """`clean`, `dirty` or `unknown`."""
    restarts: int = 0
    """Restarts of the engine containers of its pods."""
    node: str | None = Field(default=None, max_length=253)
    """Node of its pod; for an engine with several pods, node of pod 0."""
    port: int | None = None
    """Port of its gate on the node, with `engine.network.hostNetwork`."""
    nodes: list[Annotated[str, Field(max_length=253)]] | None = Field(default=None, max_length=64)
    """Nodes of its pods in rank order, if it has several pods; an empty string for a pod without a node."""
    lost: bool | None = None
    """True if the engine stopped serving for a reason other than an update, a pause, a sleep or the router; absent again when
    the engine serves."""
    reason: Code = ""
    """Why the engine does not serve, as a CamelCase code; empty while it serves."""
    message: Text = ""
    """Why the engine does not serve, as a sentence; empty while it serves."""


class LastUpdate(ApiModel):
    """The last weight update that ended."""

    version: str = Field(max_length=256)
    """Version that the update was to commit."""
    outcome: str = Field(max_length=32)
    """`Committed`, `Partial` (committed on some engines), `Failed`, or `Aborted` (given up before any engine changed)."""
    message: Text = ""
    """Why the update did not commit on all engines, as a sentence."""
    unchecked: Text = ""
    """What was not compared with the engines' model, and why; empty if all names and shapes were. Engines ignore tensors whose names their
    model does not have."""
    finished: str = Field(json_schema_extra={"format": "date-time"})
    """When the update ended."""
    phases_ms: dict[str, int] = Field(default_factory=dict, json_schema_extra={"maxProperties": 32})
    """Duration of each phase in milliseconds."""
    engines: int = 0
    """Engines that committed the version."""
    author: str = Field(default="", max_length=MAX_AUTHOR)
    """Caller whose update it was: `namespace/owner`, for example `ml/Job/train`. Empty if it is not known."""


class RecentUpdate(ApiModel):
    """One of the last weight updates."""

    version: str = Field(max_length=256)
    """Version that the update was to commit."""
    author: str = Field(default="", max_length=MAX_AUTHOR)
    """Caller whose update it was; empty if it is not known."""
    outcome: str = Field(max_length=32)
    """`Committed`, `Partial`, `Failed` or `Aborted`, as in `lastUpdate`."""
    finished: str = Field(json_schema_extra={"format": "date-time"})
    """When the update ended."""
    milliseconds: int | None = None
    """Duration from the first pause or call to the end; absent if it is not known."""
    bytes: int | None = None
    """Bytes of the tensors that were sent. Absent if they are not known, as for handles of GPU memory."""
    reason: Code = ""
    """Why the update did not commit on all engines, as a CamelCase code; empty if it did."""
    message: str = Field(default="", max_length=MAX_RECENT_CHARACTERS)
    """Why, as a sentence. Long sentences are cut."""


class ProcessGroupFailure(ApiModel):
    """Why a process group could not be opened."""

    reason: Code = ""
    """Why, as a CamelCase code: `WorldSizeMismatch`, `MasterUnreachable`, `BackendUnavailable`, `RankZeroAbsent`, for example."""
    message: Text = ""
    """Why, and what to do, as a sentence."""


class WeightsStatus(ApiModel):
    """Weight version of the fleet."""

    committed_version: str = Field(max_length=256)
    """Version that the fleet serves: `base` (the weights at `model.path`) or the trainer's label."""
    author: str | None = Field(default=None, max_length=MAX_AUTHOR)
    """Caller that pushed the committed version: `namespace/owner`, for example `ml/Job/train`. Absent for `base`, and if it is not
    known."""
    run: int = 0
    """Run of the committed version. It grows when a trainer starts over; 0 before the first update."""
    step: int = 0
    """Step of the committed version within the run."""
    epoch: int = 0
    """Grows when an engine joins, leaves or restarts. A process group is usable while no engine that joined it has left or restarted."""
    world_size: int = 0
    """World size of a process group opened now: the trainer and all ranks of the engines that are up."""
    oldest_serving: str | None = Field(default=None, max_length=256)
    """Oldest version that an engine serves; absent while no engine serves."""
    newest_serving: str | None = Field(default=None, max_length=256)
    """Newest version that an engine serves; absent while no engine serves."""
    skew: int = 0
    """Commits between the oldest served version and the committed one; 0 except with `versionPolicy: MaxStaleness`."""
    stale: int = 0
    """Engines that are up without the committed version, except those in an open update or asleep for the trainer."""
    process_group_failure: ProcessGroupFailure | None = None
    """Why the last call to open a process group was refused or failed; absent if it was not."""
    last_update: LastUpdate | None = None
    """The last weight update that ended."""
    recent_updates: list[RecentUpdate] | None = Field(default=None, max_length=MAX_RECENT_UPDATES)
    """The last 10 weight updates that ended, the newest first; absent before the first."""


class AdapterStatus(ApiModel):
    """One adapter (LoRA)."""

    name: str = Field(max_length=MAX_ADAPTER_NAME)
    """Name in requests."""
    path: str = Field(max_length=MAX_ADAPTER_PATH)
    """Path from which engines load the adapter."""
    loaded: int = 0
    """Engines that have loaded the adapter."""
    wanted: int = 0
    """Engines that should load the adapter."""
    reason: Code = ""
    """`AdapterFailed` if an engine could not load or unload it; else empty."""
    message: Text = ""
    """Error of the engine that could not load or unload the adapter."""


class AvoidedNode(ApiModel):
    """A node on which no new engine pod is scheduled."""

    node: str = Field(max_length=253)
    """Name of the node."""
    reason: Code = "EnginesFailed"
    """Why, as a CamelCase code."""
    message: str = Field(default="", max_length=1024)
    """Why, as a sentence."""
    since: str = Field(json_schema_extra={"format": "date-time"})
    """Start of the avoidance."""
    until: str = Field(json_schema_extra={"format": "date-time"})
    """End of the avoidance."""


class NodeFailure(ApiModel):
    """One failure of an engine on a node."""

    node: str = Field(max_length=253)
    """Name of the node."""
    engine: str = Field(max_length=63)
    """Name of the engine."""
    revision: str = Field(max_length=63)
    """Revision of its pod. Failures of another revision are ignored."""
    time: str = Field(json_schema_extra={"format": "date-time"})
    """Time of the failure."""
    reason: Code = ""
    """Kubernetes' reason, such as `OOMKilled`, `Error` or `UnexpectedAdmissionError`."""
    message: str = Field(default="", max_length=512)
    """Exit code and last telling line of the log."""


class Endpoints(ApiModel):
    """URLs of the fleet."""

    url: str = Field(max_length=512)
    """URL for generating and for pushing weights."""
    generate: str = Field(default="", max_length=512)
    """URL for generating only: it serves no control calls."""
    discovery: str = Field(max_length=512)
    """URL of the discovery document: members, ranks, world size, versions."""


class RolloutStatus(ApiModel):
    """Observed state of a rollout."""

    observed_generation: int = 0
    """`metadata.generation` that this status describes."""
    replicas: int = 0
    """Engines that exist."""
    ready_replicas: int = 0
    """Engines that serve the committed weights, also while a weight update or the trainer's use of their memory interrupts them."""
    updated_replicas: int = 0
    """Engines whose pods were created from the current spec."""
    ready: str = Field(default="", max_length=32)
    """`readyReplicas` and the wanted engines, such as `2/2`."""
    base: int | None = None
    """Engines of the base; absent without `spec.elastic`."""
    selector: str = Field(default="", max_length=512)
    """Label selector of the engine pods, for autoscalers."""
    conditions: list[Condition] = Field(default_factory=list, max_length=16, json_schema_extra=map_list("type"))
    """`Ready`, `Available`, `Progressing`, `RouterReady`, `StoreReady`, `WeightsConsistent`, `WaitingForWeights`, `NetworkIsolated`,
    `Degraded`."""
    engines: list[EngineStatus] = Field(
        default_factory=list,
        max_length=MAX_ENGINE_ROWS,
        json_schema_extra=map_list(),
    )
    """The engines. If there are more than 64, engines that do not serve come first."""
    weights: WeightsStatus | None = None
    """Weight version of the fleet; absent until the coordinator has reported."""
    adapters: list[AdapterStatus] = Field(
        default_factory=list,
        max_length=MAX_ADAPTERS,
        json_schema_extra=map_list(),
    )
    """Adapters of `engine.lora`, and adapters that trainers have loaded."""
    avoided_nodes: list[AvoidedNode] | None = Field(
        default=None,
        max_length=MAX_AVOIDED_NODES,
        json_schema_extra=map_list("node"),
    )
    """Nodes on which engines failed repeatedly (`scheduling.avoidNodes`)."""
    node_failures: list[NodeFailure] | None = Field(default=None, max_length=MAX_NODE_FAILURES)
    """Failures of engines that count towards avoiding their node; absent without `scheduling.avoidNodes`."""
    endpoints: Endpoints | None = None
    """URLs of the fleet."""


Status = Literal["True", "False", "Unknown"]


class ConditionType(StrEnum):
    """Types of conditions."""

    READY = "Ready"
    """All wanted engines, or those of the base, were created from the current spec and serve the committed weights. It stays true during
    a training step: a weight update, or a sleep for the trainer."""
    AVAILABLE = "Available"
    """At least one engine serves. It stays true during a training step."""
    PROGRESSING = "Progressing"
    """The fleet does not match the spec yet, or a weight update is open."""
    ROUTER_READY = "RouterReady"
    """The router pod runs, so that the URL accepts weights and serves the discovery document."""
    STORE_READY = "StoreReady"
    """The weight store runs and has the committed version, if a version came through it. Only with `weights.transport: Staged`."""
    WEIGHTS_CONSISTENT = "WeightsConsistent"
    """All engines that no open update has reached hold the committed version."""
    WAITING_FOR_WEIGHTS = "WaitingForWeights"
    """An engine is up but does not serve, because it does not hold the committed version."""
    NETWORK_ISOLATED = "NetworkIsolated"
    """The cluster enforces the NetworkPolicies of the fleet."""
    DEGRADED = "Degraded"
    """A failure needs a person's attention."""


class Reason(StrEnum):
    """Why a condition, or a row of ``status``, has its value. Programs may compare these codes."""

    ALL_SERVING = "AllServing"
    """All wanted engines serve the committed version."""
    BASE_SERVING = "BaseServing"
    """The engines of `elastic.base` serve, and a surplus engine does not."""
    SCALED_TO_ZERO = "ScaledToZero"
    """`spec.replicas` is 0."""
    SUSPENDED = "Suspended"
    """`spec.state` is `Suspended`."""
    PAUSED = "Paused"
    """`spec.state` is `Paused`."""
    ASLEEP = "Asleep"
    """`spec.state` is `Asleep`."""
    ASLEEP_FOR_TRAINER = "AsleepForTrainer"
    """A trainer has released the memory of the engines."""
    ENGINES_SERVING = "EnginesServing"
    """At least one engine serves."""
    NO_ENGINE_SERVING = "NoEngineServing"
    """No engine serves."""
    SETTLED = "Settled"
    """All objects match the spec."""
    AS_EXPECTED = "AsExpected"
    """Nothing needs attention."""
    ROUTER_RUNNING = "RouterRunning"
    """The router pod runs."""
    STORE_RUNNING = "StoreRunning"
    """The weight store runs and has every version that it should have."""
    ALL_AT_COMMITTED = "AllAtCommitted"
    """Every engine that is up holds the committed version."""
    NOT_REPORTED = "NotReported"
    """The coordinator has not reported yet."""
    ENFORCED = "Enforced"
    """A connection that the NetworkPolicies forbid failed."""
    NOT_ENFORCED = "NotEnforced"
    """A connection that the NetworkPolicies forbid was accepted."""
    HOST_NETWORK = "HostNetwork"
    """The engines use the network of their node, to which NetworkPolicies do not apply."""
    NETWORK_OPEN = "NetworkOpen"
    """The spec admits every source: `security.network` or `security.control` is `Open`, or `security.trainers.cidrs` contains
    addresses of pods."""
    NOT_ALLOWED = "NotAllowed"
    """The spec asks for something that an administrator has not allowed: by a flag of the operator, or by a right."""
    INVALID_CERTIFICATE = "InvalidCertificate"
    """The Secret of `security.tls` does not exist, lacks a key, or its private key does not belong to its certificate."""
    INVALID_SPEC = "InvalidSpec"
    """The operator cannot read the spec, or cannot use `podTemplate` or `affinity`."""
    APPLY_FAILED = "ApplyFailed"
    """The API server refused to create, change or delete a child."""
    NAME_TAKEN = "NameTaken"
    """An object of another owner has the name of a child."""
    IMAGE_PULL_FAILED = "ImagePullFailed"
    """An image cannot be pulled."""
    ENGINE_CRASHED = "EngineCrashed"
    """The process of an engine ended."""
    CREATE_FAILED = "CreateFailed"
    """Pods cannot be created."""
    PLUGIN_MISSING = "PluginMissing"
    """The plug-in has not proved that it is active inside SGLang, and `engine.plugin` is `Required`."""
    RESTART_BUDGET_EXHAUSTED = "RestartBudgetExhausted"
    """An engine of several pods failed to start too often in a row and is not started again."""
    INSUFFICIENT_CAPACITY = "InsufficientCapacity"
    """No node has room for an engine."""
    WAITING_FOR_QUEUE = "WaitingForQueue"
    """An engine waits for quota in its LocalQueue of Kueue."""
    QUEUE_NOT_FOUND = "QueueNotFound"
    """`scheduling.queueName` names no LocalQueue."""
    GANG_NOT_POSSIBLE = "GangNotPossible"
    """`scheduling.gang` is set, and the cluster has no PodGroups."""
    PODS_NOT_READY = "PodsNotReady"
    """Pods of an engine are starting or being deleted."""
    CLAIM_UNAVAILABLE = "ClaimUnavailable"
    """A PersistentVolumeClaim or ResourceClaim of an engine's pod does not exist, or has no volume."""
    ROUTER_NOT_READY = "RouterNotReady"
    """The router pod does not run."""
    STORE_NOT_READY = "StoreNotReady"
    """The weight store does not run (`weights.transport: Staged`). The engines serve, and the fleet takes no new weights."""
    STORE_CRASHED = "StoreCrashed"
    """The process of the weight store ended repeatedly."""
    STORE_LACKS_VERSION = "StoreLacksVersion"
    """The weight store runs and lacks the committed version. Engines that restart copy it from other engines; pushes are taken."""
    SNAPSHOT_FAILED = "SnapshotFailed"
    """The weight store could not write its newest snapshot (`weights.store.snapshots`). The fleet serves and takes weights."""
    UPDATES_REFUSED = "UpdatesRefused"
    """SGLang refuses every update of the weights in an engine, because of how the engine was started."""
    UPDATING = "Updating"
    """A rolling update of the engines' pods is running."""
    SCALING = "Scaling"
    """Engines are being added or removed."""
    SCALED_DOWN = "ScaledDown"
    """An engine is no longer wanted and is being removed."""
    WAITING_FOR_WEIGHTS = "WaitingForWeights"
    """An engine is up but does not hold the committed version."""
    WEIGHTS_DIVERGED = "WeightsDiverged"
    """An engine is dirty: it received a part of an update that failed."""
    UPDATING_WEIGHTS = "UpdatingWeights"
    """A weight update is open."""
    TRAINER_LOST = "TrainerLost"
    """The trainer is gone, and `weights.trainerLease.onLoss` is `Pause`."""
    UPDATE_FAILED = "UpdateFailed"
    """The last weight update failed."""
    PARTLY_COMMITTED = "PartlyCommitted"
    """The last weight update was committed without some engines (`weights.minCommitted`)."""
    ROUTER_PAUSED = "RouterPaused"
    """Someone has paused the router's Deployment (`kubectl rollout pause`), so that changes of the spec do not reach its pods."""
    FIELDS_CONTESTED = "FieldsContested"
    """Another client keeps changing an object of the rollout, and the operator keeps restoring it."""
    NODES_AVOIDED = "NodesAvoided"
    """New engine pods are kept off a node (`scheduling.avoidNodes`)."""
    ADAPTER_FAILED = "AdapterFailed"
    """An engine could not load or unload an adapter."""
    ENGINES_FAILED = "EnginesFailed"
    """Engines failed repeatedly on a node."""
    UNSCHEDULABLE = "Unschedulable"
    """No node takes the pod of the weight store."""


@dataclass(frozen=True)
class Finding:
    """Present status of one condition."""

    type: ConditionType
    status: Status
    reason: Reason
    message: str


def conditions(findings: Iterable[Finding], previous: Iterable[Mapping[str, Any]], *, generation: int, now: str) -> list[Condition]:
    """Return the conditions. ``lastTransitionTime`` is ``now`` where ``status`` has changed, else it is kept."""
    before = {str(condition.get("type")): condition for condition in previous}
    result = []
    for finding in findings:
        old = before.get(finding.type.value, {})
        since = old.get("lastTransitionTime") if old.get("status") == finding.status else None
        result.append(
            Condition(
                type=finding.type.value,
                status=finding.status,
                reason=finding.reason.value,
                message=finding.message,
                observed_generation=generation,
                last_transition_time=since or now,
            )
        )
    return result


def find(status: Mapping[str, Any] | None, kind: ConditionType) -> Mapping[str, Any]:
    """Return a condition of a status; empty if there is none of this type."""
    found = ((status or {}).get("conditions")) or []
    return next((condition for condition in found if condition.get("type") == kind.value), {})
