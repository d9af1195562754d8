"""``spec.engine`` of an SGLangRollout: the SGLang servers."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from sglang_rollout.api.engine_flags import (
    DETERMINISTIC,
    EP_SPANNING,
    EngineFlags,
    Lora,
    rule_against_lora_flags,
    rule_of_data_parallelism,
    rule_of_expert_kernels,
    rules_against_repeated_flags,
)
from sglang_rollout.api.flag_families import ENGINE_FAMILIES, MAX_ACCEPTED, AcceptedFlag, rules_of_families
from sglang_rollout.api.limits_spec import Limits
from sglang_rollout.api.network_spec import Cache, Network, Rdma, rules_against_repeated_variables, rules_of_engine_ports
from sglang_rollout.api.pod_template import Labels
from sglang_rollout.api.schema import ANY_QUANTITY, QUANTITY, ApiModel, argument, map_list, refuse_flags_like, rule, rules, with_rules
from sglang_rollout.plugin.settings import RUN_VARIABLE, SETTINGS_VARIABLE

Quantity = Annotated[int | str, Field(json_schema_extra={"x-kubernetes-int-or-string": True, "maxLength": 64, "pattern": ANY_QUANTITY})]

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
"""Flags of ``sglang.launch_server`` that the operator sets, or that would break the fence or weight updates.

With several tokenizer workers (measured with 0.5.23) only the worker that received an update knows the new version, and
``/model_info`` alternates between both. The file of ``--config`` may contain any flag.
"""

_OWNED_FAMILIES = (
    "--ssl-keyfile",
    "--ssl-certfile",
    "--ssl-ca-certs",
    "--ssl-keyfile-password",
    "--enable-ssl-refresh",
    "--disaggregation-mode",
)
"""Well-known flags of the refused beginnings, which get no second message."""

NODE_RANK_ENV = "SGLANG_ROLLOUT_NODE_RANK"
"""Environment variable with the index of a pod in its engine, for engines with several pods."""

ENGINE_ENV = (
    *("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "SGLANG_RUST_SERVER", NODE_RANK_ENV),
    *(SETTINGS_VARIABLE, RUN_VARIABLE),
)
"""Environment variables that would break health checks, the control API, the plug-in or the ranks of an engine's pods."""

_GPUS = "self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.data"
ONE_POD = f"(!has(self.nodes) || self.nodes == 1) && (self.gpuResource == '' || !has(self.gpusPerPod) || self.gpusPerPod == {_GPUS})"
"""CEL expression on ``engine`` for "one pod holds the whole engine"."""


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
            " out, and encrypt the fleet's URL with security.tls.",
        ),
        refuse_flags_like(
            "--disagg",
            message="engine.args must not set --disaggregation flags: every engine of a fleet prefills and decodes. Leave them out.",
        ),
    ),
]


class Parallelism(ApiModel):
    """Distribution of one engine over devices."""

    model_config = with_rules(
        rule(
            # has(), because the API server checks the default of parallelism, {}, before it fills in the fields.
            "!has(self.tensor) || self.tensor % self.expert == 0",
            "engine.parallelism.expert must divide tensor: the tensor-parallel ranks are what experts are spread over. Use a"
            " divisor of tensor, or a larger tensor.",
            field=".expert",
        ),
        rule(
            "!has(self.tensor) || self.tensor % self.attentionData == 0",
            "engine.parallelism.attentionData must divide tensor: the tensor-parallel ranks are split into that many groups. Use"
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

    tensor: int = Field(default=1, ge=1, le=64)
    """Tensor-parallel ranks of one engine. They are consecutive ranks in a trainer's process group."""
    pipeline: int = Field(default=1, ge=1, le=64)
    """Pipeline stages, each of `tensor` ranks. Above 1 only with `weights.transport: Staged` or `Disk`, because SGLang then cannot
    receive weights over a process group."""
    data: int = Field(default=1, ge=1, le=64)
    """Copies of the model behind one server, each of `tensor * pipeline` ranks, all in one pod. Above 1 only with
    `weights.transport: Staged` or `Disk`. More engines (`replicas`) have the same effect with each transport."""
    expert: int = Field(default=1, ge=1, le=64)
    """Expert-parallel size of a mixture-of-experts model (`--ep-size`); must divide `tensor`."""
    attention_data: int = Field(default=1, ge=1, le=64)
    """Data-parallel size of the attention layers (`--attn-dp-size`); must divide `tensor`. For models whose KV cache cannot be split
    by heads (MLA)."""


class PluginUse(StrEnum):
    """Use of the plug-in inside SGLang."""

    REQUIRED = "Required"
    OPTIONAL = "Optional"


class PrefixCache(StrEnum):
    """Use of cached prefixes by requests of other weight versions."""

    PER_VERSION = "PerVersion"
    SHARED = "Shared"


class EnvVar(ApiModel):
    """One environment variable."""

    name: str = Field(min_length=1, max_length=256)
    """Name of the variable."""
    value: str | None = Field(default=None, max_length=32768)
    """Value of the variable."""
    value_from: dict[str, Any] | None = None
    """Source of the value (`secretKeyRef`, `configMapKeyRef`, `fieldRef`, …), as in a Pod."""


class Resources(ApiModel):
    """Compute resources of a container, as in a Pod."""

    requests: dict[str, Quantity] = Field(default_factory=dict, json_schema_extra={"maxProperties": 32})
    """Resources that the scheduler reserves."""
    limits: dict[str, Quantity] = Field(default_factory=dict, json_schema_extra={"maxProperties": 32})
    """Resources that the container cannot exceed."""


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


class Engine(EngineFlags):
    """The SGLang servers. Each engine is a StatefulSet, with one pod, or with several pods over several nodes."""

    model_config = with_rules(
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
            f"self.parallelism.data == 1 || ({ONE_POD})",
            "engine.parallelism.data above 1 needs the whole engine in one pod: SGLang does not spread data-parallel replicas"
            " over nodes. Use more engines (replicas) instead, or leave engine.nodes and engine.gpusPerPod out.",
            field=".parallelism.data",
        ),
        rule(
            f"self.parallelism.pipeline == 1 || ({ONE_POD}) || [has(self.nodes) ? self.nodes : ({_GPUS}) / self.gpusPerPod]"
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
        rule_of_expert_kernels(),
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
        *rules_against_repeated_flags(),
        *rules_against_repeated_variables(),
        *rules_of_engine_ports(),
        *rules_of_families("engine", ENGINE_FAMILIES, (*ENGINE_FLAGS, *_OWNED_FAMILIES)),
        rule_against_lora_flags(),
        rule_of_data_parallelism(),
    )

    image: str = Field(min_length=1, max_length=1024)
    """Image with SGLang, for example `lmsysorg/sglang:v0.5.23`. It runs as the image's own user."""
    parallelism: Parallelism = Parallelism()
    """Distribution of one engine over devices."""
    gpu_resource: str = Field(default="nvidia.com/gpu", max_length=253)
    """Extended resource of one GPU. `""`: a CPU engine, for development."""
    gpus_per_pod: int | None = Field(default=None, ge=0, le=64)
    """GPUs of each engine pod. Default: the GPUs of the engine, divided by `nodes`."""
    nodes: int | None = Field(default=None, ge=1, le=64)
    """Pods of one engine, for engines that are larger than a node. Pod 0 serves, and the other pods hold further ranks.
    Default: the number that `gpusPerPod` requires, else 1. For CPU engines only this field applies."""
    args: list[EngineArgument] = Field(default_factory=list, max_length=128)
    """Further arguments of `sglang.launch_server`, one word per item: `["--mem-fraction-static", "0.8"]`."""
    accept_flags: list[AcceptedFlag] = Field(default_factory=list, max_length=MAX_ACCEPTED)
    """Flags in `args` that are risky or new, without their values: `["--kv-events-config"]`. Known families of flags need no entry
    (docs/reference/engine-settings.md). Flags that the operator owns stay refused."""
    limits: Limits = Limits()
    """Largest requests that engines get. Larger requests are refused. A change restarts the router, and the engines one by one."""
    plugin: PluginUse = PluginUse.REQUIRED
    """The operator's plug-in inside SGLang checks requests, separates the prefix caches of versions, and lists the checkpoint's tensors.
    `Required`: an engine serves only after the plug-in has proved that it is active. `Optional`: an engine also serves without it, and then
    one request can end it, a version can reuse prefixes of older weights, and wrong names in a push are noticed late."""
    prefix_cache: PrefixCache = PrefixCache.PER_VERSION
    """`PerVersion`: a request never uses a cached prefix of other weights, also if a flush of the cache was missed. `Shared`: SGLang's
    own rule, where only flushes separate versions."""
    env: list[EnvVar] = Field(
        default_factory=list,
        max_length=128,
        json_schema_extra=map_list()
        | rules(
            rule(
                f"!self.exists(e, e.name in {list(ENGINE_ENV)})",
                "engine.env must not set " + " or ".join(ENGINE_ENV) + ": health checks and weight updates depend on them.",
            )
        ),
    )
    """Environment variables of the engine container."""
    network: Network | None = None
    """Network devices of engines and of the trainer's process group."""
    rdma: Rdma | None = None
    """RDMA devices of each engine pod."""
    check_memory_balance: bool = True
    """End SGLang at its start if one of its GPUs has less free memory than the others. False: SGLang only warns
    (`SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK`)."""
    start_seconds: int = Field(default=1800, ge=60, le=86400)
    """Seconds that an engine may take to start, with a download of its model; then it is restarted. For an engine of several pods the time
    begins when all its pods run."""
    cache: Cache | None = None
    """Keep compiled kernels (Triton, inductor, FlashInfer, DeepGEMM, …) between pods, so that engines start faster."""
    resources: Resources = Resources()
    """CPU and memory of the engine container. The operator adds the GPUs."""
    gate_resources: Resources = Resources()
    """CPU and memory of the container gate. Values that are set replace the defaults of docs/operations/sizing.md. A change restarts
    engines one by one."""
    agent_resources: Resources = Resources()
    """CPU and memory of the container agent. A change restarts engines one by one."""
    service_account_annotations: AccountAnnotations | None = None
    """Annotations of the engines' ServiceAccount `<name>-engine`, for example `eks.amazonaws.com/role-arn` or
    `iam.gke.io/gcp-service-account`. A change restarts engines one by one, because some clouds read the account when a pod is created."""
    lora: Lora | None = None
    """Adapters beside the model (LoRA)."""
    shm: str = Field(default="16Gi", max_length=32, pattern=QUANTITY)
    """Size of `/dev/shm` of the engine, for NCCL and the tokenizer processes. Only its used part counts as memory of the pod."""

    @property
    def gpus(self) -> int:
        """Ranks of one engine, each with its own GPU."""
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
