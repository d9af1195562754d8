"""``spec.weights`` of an SGLangRollout: the transfer of a trainer's weights to the engines."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from sglang_rollout.api.engine_spec import Resources
from sglang_rollout.api.network_spec import ABSOLUTE
from sglang_rollout.api.scheduling_spec import Placement
from sglang_rollout.api.schema import ApiModel, plain_path, rule, rules, sets_flag, with_rules
from sglang_rollout.sglang.api import PauseMode

SIZE = r"^[1-9][0-9]*(k|M|G|T|Ki|Mi|Gi|Ti)?$"
"""Whole quantities of bytes: ``20Gi``, ``500M``."""


def _is_staged(weights: str) -> str:
    """Return the CEL expression for "the transport is Staged"."""
    # has(), because the API server checks the default of weights, {}, before it fills in the fields.
    return f"(has({weights}.transport) && {weights}.transport == 'Staged')"


_ROLLING = "has(self.activation) && has(self.activation.strategy) && self.activation.strategy == 'Rolling'"
"""CEL expression of ``spec.weights`` for "engines load staged versions in turn"."""


class Backend(StrEnum):
    """Backends of torch.distributed."""

    NCCL = "nccl"
    GLOO = "gloo"


class Transport(StrEnum):
    """Transport of a trainer's tensors to the engines."""

    DISTRIBUTED = "Distributed"
    DISK = "Disk"
    STAGED = "Staged"


class Deadlines(ApiModel):
    """Limits for the steps of a weight update. A step that takes longer ends the update, and the fleet keeps the old version."""

    group_seconds: int = Field(default=120, ge=1, le=86400)
    """Seconds to open a process group: the trainer's address becomes reachable, and every engine joins."""
    update_seconds: int = Field(default=300, ge=1, le=86400)
    """Seconds for one call of an update: begin, one bucket of tensors, or end."""
    idle_seconds: int = Field(default=120, ge=1, le=86400)
    """Seconds without a call or heartbeat of the trainer after which its pause or update is aborted."""
    pause_seconds: int = Field(default=60, ge=1, le=86400)
    """Seconds for the calls that pause or resume the engines."""
    total_seconds: int = Field(default=1800, ge=1, le=86400)
    """Seconds after which a pause or an update is aborted, also if the trainer is active."""
    stuck_seconds: int = Field(default=30, ge=1, le=86400)
    """Seconds after which an engine that has not answered a call of an aborted update is restarted, because nothing else ends a
    broadcast whose sender is gone."""
    stage_seconds: int = Field(default=600, ge=1, le=86400)
    """Seconds in which all engine pods copy a version, with transport `Staged`."""
    activate_seconds: int = Field(default=300, ge=1, le=86400)
    """Seconds in which an engine loads its copy of a version, with transport `Staged`."""
    silent_seconds: int = Field(default=120, ge=1, le=86400)
    """Seconds without an answer to a health check, which generates one token, after which an engine is restarted. It must exceed the
    time to prefill the longest prompt."""


class Medium(StrEnum):
    """Where an engine pod keeps staged versions."""

    MEMORY = "Memory"
    DISK = "Disk"


class TrainerPause(StrEnum):
    """Effect of a trainer's pause."""

    HONOUR = "Honour"
    DEFER = "Defer"


class Staging(ApiModel):
    """Copies of versions beside every engine, with transport `Staged`."""

    copies: int = Field(default=2, ge=1, le=2)
    """Complete versions in each engine pod. `2`: the next version arrives while the committed one stays. `1`: the committed one is
    deleted when the next one begins."""
    size_limit: str = Field(max_length=32, pattern=SIZE)
    """Maximum bytes of one version, such as `20Gi`. With `medium: Memory` each engine pod and the weight store reserve memory for `copies`
    of them."""
    medium: Medium = Medium.MEMORY
    """`Memory`: a memory-backed volume. `Disk`: a volume on the node's disk."""
    fanout: int = Field(default=4, ge=1, le=64)
    """Maximum number of pods that copy a version from the same pod at a time."""
    trainer_pause: TrainerPause = TrainerPause.HONOUR
    """Effect of a trainer's `/pause_generation`. `Honour`: engines are paused until the trainer continues, also while it sends the version.
    `Defer`: running requests are aborted or retracted once, as the trainer asks; then engines generate with the old version until they load
    the new one. Not for all trainers: see docs/how-to/defer-pauses.md."""


class SnapshotVolume(ApiModel):
    """Volume of the snapshots. One of `claim` and `hostPath`."""

    model_config = with_rules(
        rule("has(self.claim) != has(self.hostPath)", "weights.store.snapshots.volume takes exactly one of claim and hostPath."),
    )

    claim: str | None = Field(default=None, min_length=1, max_length=253)
    """PersistentVolumeClaim in the namespace of this object. The user of the engine's container must be able to write it."""
    host_path: str | None = Field(
        default=None, max_length=1024, pattern=ABSOLUTE, json_schema_extra=plain_path("weights.store.snapshots.volume.hostPath")
    )
    """Folder of the node, created if it is missing. Only for a weight store that stays on one node (`store.scheduling`)."""


class StoreSnapshots(ApiModel):
    """Committed versions on a volume that outlives all pods."""

    volume: SnapshotVolume
    """Volume of the snapshots. They lie in the folder `<namespace>/<name>` of it."""
    every: int = Field(default=1, ge=1, le=1000000)
    """Versions between two snapshots. A fleet whose pods all end serves again by itself only if its last version was written."""
    keep_last: int = Field(default=3, ge=1, le=1000)
    """Number of the newest snapshots that stay. The volume needs room for one more."""


class ActivationStrategy(StrEnum):
    """Order in which engines load a staged version."""

    ALL_AT_ONCE = "AllAtOnce"
    ROLLING = "Rolling"


class Activation(ApiModel):
    """Load of a staged version into the engines, with transport `Staged`. One engine loads it first in any case."""

    strategy: ActivationStrategy = ActivationStrategy.ALL_AT_ONCE
    """`AllAtOnce`: the other engines load it together. `Rolling`: in turn; engines that wait generate with the version before, so it needs
    `versionPolicy: MaxStaleness`."""
    max_unavailable: int | str = Field(
        default=1,
        json_schema_extra={
            "x-kubernetes-int-or-string": True,
            **rules(
                rule(
                    "type(self) == int ? self >= 1 && self <= 64 : string(self).matches('^([1-9][0-9]?|100)%$')",
                    'weights.activation.maxUnavailable must be a number of engines from 1 to 64, or a share of them such as "25%".',
                )
            ),
        },
    )
    """Engines that load a version at a time, with `Rolling`: a number, or a share of `replicas` such as `25%`, rounded down, at least 1."""


class StoreGPU(ApiModel):
    """One GPU of the weight store. `gpu: {}` takes the default."""

    resource: str = Field(default="nvidia.com/gpu", min_length=1, max_length=253)
    """Extended resource of one GPU."""


class Store(ApiModel):
    """The pod that receives versions from the trainer and feeds the engine pods, with transport `Staged`."""

    model_config = with_rules(
        rule(
            "!has(self.gpu) || !has(self.resources) || !has(self.resources.limits) || !(self.gpu.resource in self.resources.limits)",
            "weights.store.resources must not set the GPU resource: the operator sets one GPU from weights.store.gpu. Leave it out of"
            " resources.",
            field=".resources",
        ),
    )

    resources: Resources = Resources()
    """CPU and memory of the container store, without the memory of versions. Values that are set replace the defaults of
    docs/operations/sizing.md."""
    scheduling: Placement = Placement()
    """Node of the weight store. `spec.scheduling` applies to it only with `gpu`: then its node selector, its tolerations and its node
    affinity replace those that are not set here."""
    gpu: StoreGPU | None = None
    """A GPU, with which the weight store also receives process groups with the backend `nccl`. Without it only `gloo`."""
    snapshots: StoreSnapshots | None = None
    """Snapshots of committed versions. Without them a fleet whose pods all end at the same time waits for the next push."""


class OnLoss(StrEnum):
    """Reaction of an idle fleet to a lost trainer."""

    KEEP_SERVING = "KeepServing"
    PAUSE = "Pause"


class TrainerLease(ApiModel):
    """Detection of a lost trainer."""

    ttl_seconds: int = Field(default=20, ge=1, le=86400)
    """Seconds without a call or heartbeat after which the coordinator probes the trainer's store. If the store is gone, the
    trainer's pause or update is aborted."""
    on_loss: OnLoss = OnLoss.KEEP_SERVING
    """Reaction of an idle fleet. `KeepServing`: it serves the committed version. `Pause`: it generates nothing until a trainer calls."""


class CatchUp(ApiModel):
    """Source of the committed version for engines that restart or start later. Without a source they wait for the next push."""

    disk: str | None = Field(
        default=None, min_length=1, max_length=1024, pattern="^/", json_schema_extra=plain_path("weights.catchUp.disk")
    )
    """Path in the engine pods: the folder of snapshots that the client writes, or the path of the trainer's own checkpoints with
    `{version}` in place of the label, for example `/ckpt/step_{version}/hf`. `podTemplate` mounts the volume."""
    parallel: int = Field(default=4, ge=1, le=1000)
    """Maximum number of engines that load at a time."""


class Verify(StrEnum):
    """Updates that are verified before their commit."""

    ALWAYS = "Always"
    EVERY_N = "EveryN"
    OFF = "Off"


class VersionPolicy(StrEnum):
    """Versions that engines may serve."""

    LATEST_ONLY = "LatestOnly"
    MAX_STALENESS = "MaxStaleness"


class Weights(ApiModel):
    """Transfer of a trainer's weights to the engines."""

    model_config = with_rules(
        # has(versionPolicy), because the API server checks the default of weights, {}, before it fills in the fields.
        rule(
            "has(self.maxStaleness) == (has(self.versionPolicy) && self.versionPolicy == 'MaxStaleness')",
            "weights.maxStaleness belongs to versionPolicy MaxStaleness: set both, or neither.",
            field=".maxStaleness",
        ),
        rule(
            f"!{_is_staged('self')} || has(self.staging)",
            "weights.transport Staged needs weights.staging.sizeLimit, the maximum bytes of one version: engine pods and the weight store"
            " reserve room for it. Set it.",
            field=".staging",
        ),
        rule(
            f"(!has(self.staging) && !has(self.store)) || {_is_staged('self')}",
            "weights.staging and weights.store belong to transport Staged: set the transport, or leave them out.",
            field=".staging",
        ),
        rule(
            f"!{_is_staged('self')} || !has(self.catchUp) || !has(self.catchUp.disk)",
            "weights.transport Staged needs no weights.catchUp.disk: an engine that restarts loads the copy in its pod, or that of another"
            " pod or of the weight store. Leave it out.",
            field=".catchUp",
        ),
        rule(
            f"!({_ROLLING}) || {_is_staged('self')}",
            "weights.activation.strategy Rolling needs weights.transport Staged: with another transport all engines receive a version at"
            " the same time. Set the transport, or use AllAtOnce.",
            field=".activation",
        ),
        rule(
            f"!({_ROLLING}) || has(self.maxStaleness)",
            "weights.activation.strategy Rolling needs weights.versionPolicy MaxStaleness and maxStaleness 1 or more: engines that wait"
            " serve the version before. Set both, or use AllAtOnce.",
            field=".activation",
        ),
    )

    transport: Transport = Transport.DISTRIBUTED
    """`Distributed`: over a process group with the engines, or from disk if the trainer chooses it. `Disk`: only by
    `update_weights_from_disk`; calls about process groups are refused. `Staged`: the trainer sends a version to the weight store, over a
    process group or HTTP; engine pods copy it while engines generate; then engines load their copies in a short pause. Engines with
    `parallelism.data` above 1 need `Disk` or `Staged`. A change restarts engines if the old or the new value is `Staged`."""
    backend: Backend = Backend.NCCL
    """Backend of the process group if the trainer names none. `gloo` for CPU engines."""
    pause_mode: PauseMode = PauseMode.RETRACT
    """Treatment of running requests during an update, unless the trainer pauses the engines itself. `Retract`: they return to the queue
    and continue with the new weights. `Abort`: they end. `InPlace`: they continue with the cache of the old weights."""
    version_policy: VersionPolicy = VersionPolicy.LATEST_ONLY
    """Versions that engines may serve. `LatestOnly`: the committed version. `MaxStaleness`: also versions of the same run that are at
    most `maxStaleness` commits older."""
    max_staleness: int | None = Field(default=None, ge=1, le=64)
    """Number of commits by which a served version may be older, with `versionPolicy: MaxStaleness`."""
    min_committed: int | str | None = Field(
        default=None,
        json_schema_extra={
            "x-kubernetes-int-or-string": True,
            **rules(
                rule(
                    "type(self) == int ? self >= 1 : string(self).matches('^([1-9][0-9]?|100)%$')",
                    'weights.minCommitted must be a number of engines from 1 on, or a share of them such as "75%".',
                )
            ),
        },
    )
    """Engines that must hold a new version before it is committed: a number, or a share of `replicas` such as `75%`. Only the engines that
    fail at the end of an update are then fenced, and the first update does not wait for all engines. Default: all engines that take
    part."""
    verify: Verify = Verify.EVERY_N
    """Updates that are verified: before the commit, checksums of the weights are compared among engines of the same tensor-parallel size.
    An engine that differs is fenced. `Always`: every update. `EveryN`: the first update, and each `verifyEvery`-th after it. `Off`:
    none."""
    verify_every: int = Field(default=10, ge=1, le=1000000)
    """Interval of `verify: EveryN`, in updates."""
    deadlines: Deadlines = Deadlines()
    """Limits for the steps of a weight update."""
    trainer_lease: TrainerLease = TrainerLease()
    """Detection of a lost trainer."""
    catch_up: CatchUp = CatchUp()
    """Source of the committed version without the trainer."""
    staging: Staging | None = None
    """Copies of versions beside every engine; needed with transport `Staged`."""
    store: Store | None = None
    """The weight store, with transport `Staged`."""
    activation: Activation = Activation()
    """Load of a staged version into the engines, with transport `Staged`."""

    @property
    def is_staged(self) -> bool:
        """True with transport `Staged`."""
        return self.transport is Transport.STAGED


LOADER_FLAGS = ("--custom-weight-loader", "--startup-weight-load-mode")
"""Flags that engines with transport ``Staged`` cannot have: the operator sets the first, and SGLang refuses the second beside it."""

DRAFT_FLAG = "--speculative-draft-model-path"
"""Flag for a draft model with a checkpoint of its own."""


def rules_of_transports() -> list[dict[str, str]]:
    """Return the rules of ``spec`` about what each transport can do with the engines."""
    transport = "(has(self.weights) && has(self.weights.transport) ? self.weights.transport : 'Distributed')"
    from_disk = (
        f"({transport} == 'Disk' || ({transport} == 'Staged' && self.engine.parallelism.data > 1)"
        " || (has(self.weights) && has(self.weights.catchUp) && has(self.weights.catchUp.disk)))"
    )
    staged = f"{transport} == 'Staged'"
    return [
        rule(
            f"self.mode != 'Standalone' || self.engine.parallelism.data == 1 || {transport} in ['Disk', 'Staged']",
            "engine.parallelism.data above 1 needs weights.transport Staged or Disk: SGLang cannot then take weights over a process group."
            " Set one of them, or use more engines (replicas) instead of data.",
            field=".engine",
        ),
        rule(
            f"self.mode != 'Standalone' || self.engine.parallelism.pipeline == 1 || {transport} in ['Disk', 'Staged']",
            "engine.parallelism.pipeline above 1 needs weights.transport Staged or Disk: SGLang cannot then take weights over a process"
            " group. Set one of them, or use more tensor ranks instead of pipeline stages.",
            field=".engine",
        ),
        rule(
            f"!({staged}) || !has(self.engine.network) || !self.engine.network.hostNetwork",
            "weights.transport Staged cannot be used with engine.network.hostNetwork: agents serve copies at a port of their pod, and"
            " engines are in no process group that would need the network of the node. Leave hostNetwork out.",
            field=".engine",
        ),
        rule(
            f"!({staged}) || !({sets_flag(*LOADER_FLAGS, engine='self.engine')})",
            f"With weights.transport Staged leave {' and '.join(LOADER_FLAGS)} out of engine.args: the operator sets the first, and SGLang"
            " refuses both together.",
            field=".engine",
        ),
        rule(
            f"!{from_disk} || !({sets_flag(DRAFT_FLAG, engine='self.engine')})",
            f"{DRAFT_FLAG} cannot be used with weights.transport Disk, with Staged and engine.parallelism.data above 1, or with"
            " weights.catchUp.disk: SGLang would also load the model's folder into the draft model. Leave the flag out if the checkpoint"
            " has the draft layers; otherwise use transport Distributed without catchUp.disk, or Staged with data 1.",
            field=".engine",
        ),
    ]
