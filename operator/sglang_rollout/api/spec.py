"""``spec`` of an SGLangRollout: what the user writes. Every field here works; CEL rules stand beside the fields they
check."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from sglang_rollout.api.pod_template import PodTemplate
from sglang_rollout.api.schema import QUANTITY, ApiModel, refuse_flags, rule, rules

MAX_ENGINES = 1000
"""Engine names carry their index; with four digits the longest one still fits the 63 characters of a StatefulSet's
revision label."""

Quantity = Annotated[
    int | str,
    Field(json_schema_extra={"x-kubernetes-int-or-string": True, "maxLength": 64}),
]

ENGINE_FLAGS = (
    "--host",
    "--port",
    "--model-path",
    "--model",
    "--served-model-name",
    "--load-format",
    "--trust-remote-code",
    "--weight-version",
    "--tp-size",
    "--tensor-parallel-size",
    "--tp",
    "--dp-size",
    "--data-parallel-size",
    "--dp",
    "--pp-size",
    "--pipeline-parallel-size",
    "--pp",
    "--nnodes",
    "--node-rank",
    "--dist-init-addr",
    "--nccl-init-addr",
    "--api-key",
    "--admin-api-key",
    "--grpc-mode",
    "--smg-grpc-mode",
    "--weight-cache-mode",
)
"""Flags of ``sglang.launch_server`` that the operator sets itself, or that would break the fence or weight updates."""

ROUTER_FLAGS = (
    "--host",
    "--port",
    "--policy",
    "--worker-urls",
    "--service-discovery",
    "--discovery-provider",
    "--selector",
    "--prometheus-host",
    "--prometheus-port",
    "--model-alias",
    "--disable-retries",
)
"""Flags of smg that the operator sets itself, or that would take the choice of engines away from the coordinator."""

ENGINE_ENV = ("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "SGLANG_RUST_SERVER")
"""Environment variables of the engine that would break health checks or the control API."""


def _argument(flags: tuple[str, ...], message: str) -> Any:
    return Field(min_length=1, max_length=2048, json_schema_extra=rules(refuse_flags(flags, message)))


EngineArgument = Annotated[
    str,
    _argument(
        ENGINE_FLAGS,
        "engine.args must not set a flag that the operator owns: use spec.model and engine.parallelism, and leave"
        " addresses, keys and the weight version to the operator.",
    ),
]
RouterArgument = Annotated[
    str,
    _argument(
        ROUTER_FLAGS,
        "router.args must not set a flag that the operator owns: use router.policy, and leave addresses, retries and"
        " the list of engines to the operator.",
    ),
]


class Model(ApiModel):
    """Which model the engines serve before the first weight update, and under which name."""

    path: str = Field(min_length=1, max_length=4096)
    """What SGLang's `--model-path` takes: a Hugging Face name, or a path inside the engine container (mount it with
    `podTemplate`)."""
    served_name: str | None = Field(default=None, min_length=1, max_length=256, pattern=r"^[^:\s]+$")
    """Name of the model in `/v1/models` and in OpenAI requests. Default: `path`. SGLang allows no colon in it."""
    load_format: str = Field(default="auto", min_length=1, max_length=64, pattern=r"^[a-z_]+$")
    """SGLang's `--load-format`, for example `auto`, `safetensors`, or `dummy` for random weights until the first
    update."""
    trust_remote_code: bool = False
    """Run Python code that the model's repository brings. Only for repositories you trust."""


class Parallelism(ApiModel):
    """How one engine is spread over devices."""

    tensor: int = Field(default=1, ge=1, le=64)
    """Tensor-parallel ranks of one engine. So many consecutive ranks it takes in a trainer's weight-update group."""


class EnvVar(ApiModel):
    """One environment variable."""

    name: str = Field(min_length=1, max_length=256)
    """Name of the variable."""
    value: str | None = Field(default=None, max_length=32768)
    """Its value."""
    value_from: dict[str, Any] | None = None
    """Where the value comes from (`secretKeyRef`, `configMapKeyRef`, `fieldRef`, …), as in a Pod."""


class Resources(ApiModel):
    """Compute resources of a container, as in a Pod."""

    requests: dict[str, Quantity] = Field(default_factory=dict, json_schema_extra={"maxProperties": 32})
    """What the scheduler reserves."""
    limits: dict[str, Quantity] = Field(default_factory=dict, json_schema_extra={"maxProperties": 32})
    """What the container cannot exceed."""


class Engine(ApiModel):
    """The SGLang servers. Each engine is a StatefulSet of its own with one pod."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self.gpuResource == '' || !has(self.gpusPerPod) || self.gpusPerPod == self.parallelism.tensor",
                "engine.gpusPerPod must equal engine.parallelism.tensor: one pod holds one whole engine. Leave"
                " gpusPerPod out, or set both to"
                " the same number.",
                field=".gpusPerPod",
            ),
            rule(
                "self.gpuResource != '' || !has(self.gpusPerPod) || self.gpusPerPod == 0",
                'engine.gpusPerPod must be left out (or 0) when engine.gpuResource is "": a CPU engine has no GPUs.',
                field=".gpusPerPod",
            ),
            rule(
                "self.gpuResource == '' || !has(self.resources.limits) || !(self.gpuResource in self.resources.limits)",
                "engine.resources.limits must not name the GPU resource: the operator sets it from engine.gpusPerPod.",
                field=".resources",
            ),
        )
    )

    image: str = Field(min_length=1, max_length=1024)
    """Image with SGLang, for example `lmsysorg/sglang:v0.5.23`. It runs as the image's own user."""
    parallelism: Parallelism = Parallelism()
    """How one engine is spread over devices."""
    gpu_resource: str = Field(default="nvidia.com/gpu", max_length=253)
    """Extended resource that stands for one GPU. `""` makes a CPU engine, for development."""
    gpus_per_pod: int | None = Field(default=None, ge=0, le=64)
    """GPUs of each engine pod. Default: `parallelism.tensor`."""
    args: list[EngineArgument] = Field(default_factory=list, max_length=128)
    """More arguments of `sglang.launch_server`, one word per item: `["--mem-fraction-static", "0.8"]`."""
    env: list[EnvVar] = Field(
        default_factory=list,
        max_length=128,
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
            **rules(
                rule(
                    f"!self.exists(e, e.name in {list(ENGINE_ENV)})",
                    "engine.env must not set " + " or ".join(ENGINE_ENV) + ": health checks and weight updates depend on them.",
                )
            ),
        },
    )
    """Environment variables of the engine container."""
    resources: Resources = Resources()
    """CPU and memory of the engine container. The GPUs are added by the operator."""
    shm: str = Field(default="16Gi", max_length=32, pattern=QUANTITY)
    """Size of `/dev/shm` of the engine. NCCL and the tokenizer processes use it; it counts as memory of the pod only
    when used."""


class RouterPolicy(StrEnum):
    """How requests are spread over the engines."""

    CACHE_AWARE = "CacheAware"
    ROUND_ROBIN = "RoundRobin"
    POWER_OF_TWO = "PowerOfTwo"
    CONSISTENT_HASH = "ConsistentHash"
    RANDOM = "Random"


class Router(ApiModel):
    """The pod behind the fleet's one URL: haproxy, the SGLang router (smg) and the coordinator."""

    policy: RouterPolicy = RouterPolicy.CACHE_AWARE
    """How requests are spread over the engines. Headers `x-smg-routing-key` and `x-session-id` make requests sticky
    under every policy."""
    resources: Resources = Resources()
    """CPU and memory of the smg container. The two containers beside it have small fixed requests."""
    args: list[RouterArgument] = Field(default_factory=list, max_length=64)
    """More arguments of `smg`, one word per item."""


class Backend(StrEnum):
    """Backends of torch.distributed."""

    NCCL = "nccl"
    GLOO = "gloo"


class PauseMode(StrEnum):
    """What happens to running requests while weights change."""

    RETRACT = "Retract"
    ABORT = "Abort"
    IN_PLACE = "InPlace"


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


class RolloutSpec(ApiModel):
    """The fleet that is wanted."""

    replicas: int = Field(default=1, ge=0, le=MAX_ENGINES)
    """Number of engines. `kubectl scale` sets it."""
    model: Model
    """Which model the engines serve before the first weight update."""
    engine: Engine
    """The SGLang servers."""
    router: Router = Router()
    """The pod behind the fleet's one URL."""
    weights: Weights = Weights()
    """How a trainer's weights reach the engines."""
    pod_template: PodTemplate | None = None
    """Overlay over the engine pods for everything that has no field of its own: volumes, node selectors, tolerations,
    annotations, more containers. Merged like a strategic merge patch: maps key by key, containers, volumes and
    environment by name; `null` removes a key."""
