"""``spec.engine`` of an SGLangRollout: the SGLang servers."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from sglang_rollout.api.engine_flags import (
    DETERMINISTIC,
    EP_SPANNING,
    EngineKnobs,
    Lora,
    adapters_in_experts,
    said_in_args,
    same_said_twice,
    with_copies,
)
from sglang_rollout.api.network_spec import Cache, Network, Rdma, ports_of_one_engine, variable_said_twice
from sglang_rollout.api.pod_template import Labels
from sglang_rollout.api.schema import ANY_QUANTITY, QUANTITY, ApiModel, argument, refuse_flags_like, rule, rules


class AllReduce(ApiModel):
    """An all-reduce over the ranks of each pod: with NCCL on GPUs, with gloo on CPUs. On a trainer's GPUs (`spec.mode`) it is NCCL, unless
    `weights.backend` is `gloo` or `engine.args` has `--device cpu`."""

    floor: int | None = Field(default=None, ge=1, le=100_000, alias="floorGBps")
    """GB/s of bus bandwidth (as nccl-tests counts it) that must be reached: below it SGLang is not started. Without it, it is only
    measured."""
    megabytes: int = Field(default=256, ge=1, le=4096)
    """Size of the tensor."""


class Preflight(ApiModel):
    """What is measured in the engine's container before SGLang starts."""

    all_reduce: AllReduce
    """How fast the ranks of a pod talk to one another; `allReduce: {}` takes the defaults."""


Quantity = Annotated[
    int | str,
    Field(json_schema_extra={"x-kubernetes-int-or-string": True, "maxLength": 64, "pattern": ANY_QUANTITY}),
]

ENGINE_FLAGS = (
    "--host",
    "--port",
    "--model-path",
    "--served-model-name",
    "--load-format",
    "--trust-remote-code",
    "--weight-version",
    "--tp-size",
    "--tensor-parallel-size",
    "--dp-size",
    "--data-parallel-size",
    "--pp-size",
    "--pipeline-parallel-size",
    "--expert-parallel-size",
    "--ep-size",
    "--attention-data-parallel-size",
    "--attn-dp-size",
    "--enable-dp-attention",
    "--tokenizer-worker-num",
    "--nnodes",
    "--node-rank",
    "--dist-init-addr",
    "--nccl-init-addr",
    "--api-key",
    "--admin-api-key",
    "--grpc-mode",
    "--smg-grpc-mode",
    "--weight-cache-mode",
    "--config",
)
"""Flags of ``sglang.launch_server`` that the operator sets itself, or that would break the fence or weight updates: with
several tokenizer workers (measured with 0.5.23) only the one that took an update knows the new version, and
``/model_info`` says the old one every other time. The file of ``--config`` may hold any flag."""

NODE_RANK_ENV = "SGLANG_ROLLOUT_NODE_RANK"
"""Environment variable with a pod's place in its engine, where an engine has several pods."""

NODE_NAME_ENV = "SGLANG_ROLLOUT_NODE_NAME"
"""Environment variable with the pod's node, where something is measured there."""

ENGINE_ENV = ("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "SGLANG_RUST_SERVER", NODE_RANK_ENV, NODE_NAME_ENV)
"""Environment variables of the engine that would break health checks, the control API or the ranks of its pods."""

_GPUS = "self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.data"
_ONE_POD = f"(!has(self.nodes) || self.nodes == 1) && (self.gpuResource == '' || !has(self.gpusPerPod) || self.gpusPerPod == {_GPUS})"


EngineArgument = Annotated[
    str,
    argument(
        ENGINE_FLAGS,
        "engine.args must not set a flag that the operator owns: use spec.model and engine.parallelism, and leave"
        " addresses, keys and the weight version to the operator.",
        refuse_flags_like(
            "--ssl",
            "--enable-ssl",
            message="engine.args must not set --ssl flags: the gate and the agent speak plain HTTP to SGLang, within the pod. Leave them"
            " out, and encrypt in front of the fleet's URL, for example in an Ingress.",
        ),
        refuse_flags_like(
            "--disagg",
            message="engine.args must not set --disaggregation flags: every engine of a fleet prefills and decodes. Leave them out.",
        ),
    ),
]


class Parallelism(ApiModel):
    """How one engine is spread over devices."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                # has(): the API server tries the rule on the default of parallelism, {}, before it fills in its fields.
                "!has(self.tensor) || self.tensor % self.expert == 0",
                "engine.parallelism.expert must divide tensor: the tensor-parallel ranks are what experts are spread over. Use a"
                " divisor of tensor, or a larger tensor.",
                field=".expert",
            ),
            rule(
                "!has(self.tensor) || self.tensor % self.attentionData == 0",
                "engine.parallelism.attentionData must divide tensor: the tensor-parallel ranks are split into so many groups. Use"
                " a divisor of tensor.",
                field=".attentionData",
            ),
            rule(
                "!has(self.tensor) || self.data == 1 || self.attentionData == 1",
                "engine.parallelism.data and attentionData must not both be above 1: SGLang ends at its start. Use more engines"
                " (replicas) instead of data.",
                field=".data",
            ),
        )
    )

    tensor: int = Field(default=1, ge=1, le=64)
    """Tensor-parallel ranks of one engine. So many consecutive ranks it takes in a trainer's weight-update group."""
    pipeline: int = Field(default=1, ge=1, le=64)
    """Pipeline stages, each of `tensor` ranks. Above 1 only with `weights.transport: Disk`: SGLang cannot take weights over
    a group then."""
    data: int = Field(default=1, ge=1, le=64)
    """Copies of the model behind one server, each of `tensor * pipeline` ranks, all in one pod. Above 1 only with
    `weights.transport: Disk`; more engines (`replicas`) do the same and can be updated over a group."""
    expert: int = Field(default=1, ge=1, le=64)
    """The experts of a mixture-of-experts model are spread over so many groups of these ranks; must divide `tensor`."""
    attention_data: int = Field(default=1, ge=1, le=64)
    """The ranks form so many groups that compute attention each for its own requests; must divide `tensor`. For models
    whose KV cache cannot be split by heads (MLA)."""


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


AccountAnnotations = Annotated[
    Labels,
    Field(
        json_schema_extra=rules(
            rule(
                "!self.exists(k, k.startsWith('rollout.sglang.io/'))",
                "serviceAccountAnnotations must not set annotations under rollout.sglang.io/: they belong to the operator.",
            )
        )
    ),
]


class Engine(EngineKnobs):
    """The SGLang servers. Each engine is a StatefulSet of its own, with one pod or, spread over nodes, several."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                f"self.gpuResource == '' || !has(self.gpusPerPod) || (self.gpusPerPod > 0 && ({_GPUS}) % self.gpusPerPod == 0)",
                "engine.gpusPerPod must divide the GPUs of one engine, which are tensor * pipeline * data of engine.parallelism:"
                " the pods of an engine are of one size. Use a divisor, or leave gpusPerPod out: then one pod holds the whole engine.",
                field=".gpusPerPod",
            ),
            rule(
                f"self.gpuResource == '' || !has(self.gpusPerPod) || !has(self.nodes) || self.nodes * self.gpusPerPod == {_GPUS}",
                "engine.nodes and engine.gpusPerPod must agree: nodes * gpusPerPod is tensor * pipeline * data of"
                " engine.parallelism. Leave one of them out.",
                field=".nodes",
            ),
            rule(
                "!has(self.nodes) || (self.parallelism.tensor * self.parallelism.pipeline) % self.nodes == 0",
                "engine.nodes must divide tensor * pipeline of engine.parallelism: every pod holds as many ranks. Use a divisor.",
                field=".nodes",
            ),
            rule(
                f"self.parallelism.data == 1 || ({_ONE_POD})",
                "engine.parallelism.data above 1 needs the whole engine in one pod: SGLang does not spread data-parallel replicas"
                " over nodes. Use more engines (replicas) instead, or leave engine.nodes and engine.gpusPerPod out.",
                field=".parallelism.data",
            ),
            rule(
                f"self.parallelism.pipeline == 1 || ({_ONE_POD}) || [has(self.nodes) ? self.nodes : ({_GPUS}) / self.gpusPerPod]"
                ".all(n, n > 0 && (n % self.parallelism.pipeline == 0 || self.parallelism.pipeline % n == 0))",
                "engine.parallelism.pipeline and the pods of an engine must divide one another: SGLang gives a pod whole stages, or a"
                " stage whole pods. Use as many pods as stages, or a multiple or a divisor of them.",
                field=".parallelism.pipeline",
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
            rule(
                f"!has(self.moeA2ABackend) || !(self.moeA2ABackend in {list(EP_SPANNING)})"
                " || self.parallelism.expert == self.parallelism.tensor",
                "engine.moeA2ABackend of this kind spreads the experts over all ranks: set parallelism.expert to the number in"
                " parallelism.tensor.",
                field=".moeA2ABackend",
            ),
            rule(
                "!has(self.moeA2ABackend) || self.moeA2ABackend != 'pplx' || self.parallelism.attentionData >= 2",
                "engine.moeA2ABackend pplx needs parallelism.attentionData of at least 2.",
                field=".moeA2ABackend",
            ),
            rule(
                "!has(self.moeRunnerBackend) || !(self.moeRunnerBackend in ['flashinfer_cutlass', 'flashinfer_cutedsl'])"
                " || self.parallelism.expert in [1, self.parallelism.tensor]",
                "engine.moeRunnerBackend of this kind needs parallelism.expert 1 or the number in parallelism.tensor.",
                field=".moeRunnerBackend",
            ),
            adapters_in_experts(),
            rule(
                "!self.eplb || self.parallelism.expert > 1",
                "engine.eplb moves experts between ranks: set parallelism.expert to more than 1.",
                field=".eplb",
            ),
            rule(
                f"!self.deterministicInference || !has(self.attentionBackend) || self.attentionBackend in {list(DETERMINISTIC)}",
                f"engine.deterministicInference needs an attentionBackend that can be deterministic: {', '.join(DETERMINISTIC)}.",
                field=".attentionBackend",
            ),
            rule(
                "!has(self.rdma) || (self.rdma.resource != self.gpuResource"
                " && (!has(self.resources.limits) || !(self.rdma.resource in self.resources.limits)))",
                "engine.rdma.resource is added to the limits by the operator: leave it out of engine.resources.limits; the GPUs are"
                " another resource.",
                field=".rdma",
            ),
            rule(
                "!has(self.preflight) || (self.gpuResource != '' && has(self.gpusPerPod) ? self.gpusPerPod"
                f" : ({_GPUS}) / (has(self.nodes) ? self.nodes : 1)) > 1",
                "engine.preflight.allReduce needs at least two ranks in a pod: one alone has nobody to talk to. Leave it out.",
                field=".preflight",
            ),
            *same_said_twice(),
            *variable_said_twice(),
            *ports_of_one_engine(),
            said_in_args(),
            with_copies(),
        )
    )

    image: str = Field(min_length=1, max_length=1024)
    """Image with SGLang, for example `lmsysorg/sglang:v0.5.23`. It runs as the image's own user."""
    parallelism: Parallelism = Parallelism()
    """How one engine is spread over devices."""
    gpu_resource: str = Field(default="nvidia.com/gpu", max_length=253)
    """Extended resource that stands for one GPU. `""` makes a CPU engine, for development."""
    gpus_per_pod: int | None = Field(default=None, ge=0, le=64)
    """GPUs of each engine pod. Default: all GPUs of the engine, or what `nodes` leaves for each pod."""
    nodes: int | None = Field(default=None, ge=1, le=64)
    """Pods of one engine, for engines that are larger than a machine: pod 0 serves, the others hold further ranks. Default:
    what `gpusPerPod` makes necessary, else 1. CPU engines have this field only."""
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
    network: Network | None = None
    """Over which devices engines and the trainer's group talk."""
    rdma: Rdma | None = None
    """RDMA devices of each engine pod."""
    check_memory_balance: bool = True
    """SGLang ends at its start when one of its GPUs has less free memory than the others. False: it only warns
    (`SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK`)."""
    cache: Cache | None = None
    """Keep compiled kernels (Triton, inductor, FlashInfer, DeepGEMM, …) between pods: engines start faster."""
    resources: Resources = Resources()
    """CPU and memory of the engine container. The GPUs are added by the operator."""
    service_account_annotations: AccountAnnotations | None = None
    """Annotations of the engines' ServiceAccount `<name>-engine`, for example `eks.amazonaws.com/role-arn` or
    `iam.gke.io/gcp-service-account`. A change restarts engines one by one, because some clouds look at the account when a pod is made."""
    preflight: Preflight | None = None
    """What is measured before SGLang starts."""
    lora: Lora | None = None
    """Adapters beside the model (LoRA)."""
    shm: str = Field(default="16Gi", max_length=32, pattern=QUANTITY)
    """Size of `/dev/shm` of the engine. NCCL and the tokenizer processes use it; it counts as memory of the pod only
    when used."""

    @property
    def gpus(self) -> int:
        """Ranks of one engine, each of which has a GPU of its own."""
        sizes = self.parallelism
        return sizes.tensor * sizes.pipeline * sizes.data

    @property
    def pods(self) -> int:
        """Pods of one engine."""
        if self.nodes is not None:
            return self.nodes
        return self.gpus // self.gpus_per_pod if self.gpu_resource and self.gpus_per_pod else 1

    @property
    def pod_gpus(self) -> int:
        """GPUs of one pod."""
        return self.gpus // self.pods
