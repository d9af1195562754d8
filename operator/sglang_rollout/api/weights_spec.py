"""``spec.weights`` of an SGLangRollout: how a trainer's weights reach the engines."""

from __future__ import annotations

from enum import StrEnum

from pydantic import ConfigDict, Field

from sglang_rollout.api.schema import ApiModel, rule, rules
from sglang_rollout.sglang import api as sglang


class Backend(StrEnum):
    """Backends of torch.distributed."""

    NCCL = "nccl"
    GLOO = "gloo"


class Transport(StrEnum):
    """How a trainer's tensors come to the engines."""

    DISTRIBUTED = "Distributed"
    DISK = "Disk"


class PauseMode(StrEnum):
    """What happens to running requests while weights change."""

    RETRACT = "Retract"
    ABORT = "Abort"
    IN_PLACE = "InPlace"

    @property
    def sglang(self) -> sglang.PauseMode:
        """SGLang's name of the mode (``/pause_generation``)."""
        return sglang.PauseMode[self.name]


class Deadlines(ApiModel):
    """How long each step of a weight update may take. A step that takes longer ends the update; the fleet goes on at
    the old version."""

    group_seconds: int = Field(default=120, ge=1, le=86400)
    """Opening a group: the trainer's address becomes reachable and every engine has joined."""
    update_seconds: int = Field(default=300, ge=1, le=86400)
    """One call of an open update: begin, one bucket of tensors, end."""
    idle_seconds: int = Field(default=120, ge=1, le=86400)
    """A paused or half-updated fleet hears nothing from its trainer for so long: the update is given up."""
    pause_seconds: int = Field(default=60, ge=1, le=86400)
    """Pausing or continuing all engines."""
    total_seconds: int = Field(default=1800, ge=1, le=86400)
    """A pause or an update altogether, however lively its trainer is."""
    stuck_seconds: int = Field(default=30, ge=1, le=86400)
    """An engine that has not answered a call of a given-up update for so long is restarted: nothing else ends a
    collective whose peer is gone."""
    silent_seconds: int = Field(default=120, ge=1, le=86400)
    """An engine that was up, has no call to answer and generates no token for so long is restarted: its process hangs.
    More than the longest prompt takes to prefill."""


class OnLoss(StrEnum):
    """What an idle fleet does when its trainer is lost."""

    KEEP_SERVING = "KeepServing"
    PAUSE = "Pause"


class TrainerLease(ApiModel):
    """How long a trainer is believed to live without a word."""

    ttl_seconds: int = Field(default=20, ge=1, le=86400)
    """After so long a silence the trainer's store is asked for; if it is gone, what the trainer had open is given up.
    Heartbeats of our client count as words."""
    on_loss: OnLoss = OnLoss.KEEP_SERVING
    """What an idle fleet does then. `Pause`: it generates nothing until a trainer calls."""


class CatchUp(ApiModel):
    """Where an engine that restarted, or came after the trainer's group was opened, gets the committed version without
    the trainer. Without a place it waits for the trainer's next push."""

    disk: str | None = Field(default=None, min_length=1, max_length=1024, pattern="^/")
    """Path inside the engine pods: a directory of snapshots that our client writes, or the path of the trainer's own
    checkpoints with `{version}` for the version's name, for example `/ckpt/step_{version}/hf`. The volume is mounted by
    `podTemplate`."""
    parallel: int = Field(default=4, ge=1, le=1000)
    """So many engines load at a time."""


class Verify(StrEnum):
    """When the engines' weights are compared, tensor by tensor, before a version is committed."""

    ALWAYS = "Always"
    EVERY_N = "EveryN"
    OFF = "Off"


class VersionPolicy(StrEnum):
    """Which weights may be served."""

    LATEST_ONLY = "LatestOnly"
    MAX_STALENESS = "MaxStaleness"


class Weights(ApiModel):
    """How a trainer's weights reach the engines."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            # has(versionPolicy): the API server tries the rule on the default of weights, {}, before it fills in its fields.
            rule(
                "has(self.maxStaleness) == (has(self.versionPolicy) && self.versionPolicy == 'MaxStaleness')",
                "weights.maxStaleness belongs to versionPolicy MaxStaleness: set both, or neither.",
                field=".maxStaleness",
            )
        )
    )

    transport: Transport = Transport.DISTRIBUTED
    """`Distributed`: over a weight-update group (and from disk, if the trainer wants). `Disk`: only by
    `update_weights_from_disk`; calls about groups are refused. For engines with `parallelism.pipeline` or `data` above 1."""
    backend: Backend = Backend.NCCL
    """Backend of the weight-update group when the trainer names none. `gloo` for CPU engines."""
    pause_mode: PauseMode = PauseMode.RETRACT
    """How engines are paused for an update when the trainer does not pause them itself. `Retract`: running requests go
    back to the queue and continue with the new weights. `Abort`: they end. `InPlace`: they continue with the cache of
    the old weights."""
    version_policy: VersionPolicy = VersionPolicy.LATEST_ONLY
    """Which weights an engine may serve. `LatestOnly`: the committed version. `MaxStaleness`: also versions that are at
    most `maxStaleness` commits older, of the same run."""
    max_staleness: int | None = Field(default=None, ge=1, le=64)
    """See `versionPolicy`."""
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
    """How many engines must hold a new version so that it is committed: a number, or a share of `replicas` such as
    `75%`. Engines that fail at the end of an update are then fenced alone, and a fleet may take its first weights before
    all of its engines are up. Default: all engines that take part."""
    verify: Verify = Verify.EVERY_N
    """When the engines' weights are compared by checksum before a version is committed; an engine that differs from the
    others of its shape is fenced and named. `EveryN`: the first update, and each `verifyEvery`-th after it."""
    verify_every: int = Field(default=10, ge=1, le=1000000)
    """See `verify`."""
    deadlines: Deadlines = Deadlines()
    """How long each step of a weight update may take."""
    trainer_lease: TrainerLease = TrainerLease()
    """What becomes of an update whose trainer dies or falls silent."""
    catch_up: CatchUp = CatchUp()
    """How engines get the committed version without the trainer."""
