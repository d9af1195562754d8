"""Fields of ``spec.engine`` that stand for flags of ``sglang.launch_server``: settings, and adapters (LoRA).

Names of backends and types are not listed, because the engine's image decides which of them exist.
If SGLang refuses a name, ``status`` quotes SGLang in the row of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from sglang_rollout.api.schema import ApiModel, map_list, plain_path, rule, sets_flag, with_rules

_NAME = r"^[a-z0-9][a-z0-9_-]*$"

EP_SPANNING = ("megamoe", "deepep", "deepep_v2", "mooncake", "nixl", "ascend_fuseep", "flashinfer", "flashinfer_megamoe", "mori", "pplx")
"""All-to-all backends for which SGLang sets the expert size to the tensor size (0.5.23, ``arg_groups/overrides.py``)."""
DETERMINISTIC = ("ascend", "fa3", "fa4", "flashinfer", "intel_xpu", "triton")
"""Attention backends that can be deterministic (0.5.23, ``arg_groups/attention_hook.py``)."""


class LogLevel(StrEnum):
    """How much an engine logs."""

    DEBUG = "Debug"
    INFO = "Info"
    WARNING = "Warning"
    ERROR = "Error"


class EngineFlags(ApiModel):
    """Settings of the SGLang servers. SGLang chooses the settings that are left out."""

    mem_fraction_static_percent: int | None = Field(default=None, ge=1, le=99)
    """Share of the GPU's memory for weights and KV cache, in percent (`--mem-fraction-static`, there a fraction)."""
    max_running_requests: int | None = Field(default=None, ge=1, le=1000000)
    """Maximum number of requests that run at once; further requests wait (`--max-running-requests`)."""
    context_length: int | None = Field(default=None, ge=1, le=100000000)
    """Maximum number of tokens of prompt and completion together (`--context-length`). Default: from the model's config."""
    max_prefill_tokens: int | None = Field(default=None, ge=1, le=100000000)
    """Maximum number of tokens of one prefill batch (`--max-prefill-tokens`)."""
    chunked_prefill_size: int | None = Field(default=None, ge=-1, le=100000000)
    """Tokens of one chunk when a longer prompt is prefilled; -1: no chunks (`--chunked-prefill-size`)."""
    attention_backend: str | None = Field(default=None, max_length=64, pattern=_NAME)
    """Attention kernels, for example `fa3`, `flashinfer`, `triton` (`--attention-backend`)."""
    mm_attention_backend: str | None = Field(default=None, max_length=64, pattern=_NAME)
    """Attention kernels for images (`--mm-attention-backend`)."""
    kv_cache_dtype: str | None = Field(default=None, max_length=64, pattern=_NAME)
    """Type of the KV cache, for example `fp8_e5m2` (`--kv-cache-dtype`)."""
    quantization: str | None = Field(default=None, max_length=64, pattern=_NAME)
    """Quantization of the weights, for example `fp8` (`--quantization`)."""
    dtype: str | None = Field(default=None, max_length=64, pattern=_NAME)
    """Type of weights and activations, for example `bfloat16` (`--dtype`)."""
    random_seed: int | None = Field(default=None, ge=0, le=2147483647)
    """Seed of sampling (`--random-seed`)."""
    deterministic_inference: bool = False
    """A prompt gives the same logits in every batch (`--enable-deterministic-inference`)."""
    skip_tokenizer_init: bool = False
    """Token ids in, token ids out: the engine loads no tokenizer (`--skip-tokenizer-init`)."""
    disable_radix_cache: bool = False
    """Do not reuse the KV cache of common prefixes (`--disable-radix-cache`)."""
    moe_a2a_backend: str | None = Field(default=None, max_length=64, pattern=_NAME, alias="moeA2ABackend")
    """Backend by which experts exchange tokens, for example `deepep` (`--moe-a2a-backend`)."""
    moe_runner_backend: str | None = Field(default=None, max_length=64, pattern=_NAME)
    """Expert kernels, for example `triton` (`--moe-runner-backend`)."""
    eplb: bool = False
    """Move experts between GPUs by their load (`--enable-eplb`)."""
    memory_saver: bool = False
    """Allow memory to be released while the engine runs, for `state: Asleep` and co-located trainers (`--enable-memory-saver`)."""
    weights_cpu_backup: bool = False
    """Keep released weights in host memory, so that a fleet serves right after it wakes (`--enable-weights-cpu-backup`)."""
    log_level: LogLevel | None = None
    """How much an engine logs (`--log-level`)."""
    metrics: bool = True
    """Export SGLang's metrics: `/metrics` on the port `metrics` of each engine pod (`--enable-metrics`)."""


FLAGS: Mapping[str, str] = {
    "mem_fraction_static_percent": "--mem-fraction-static",
    "max_running_requests": "--max-running-requests",
    "context_length": "--context-length",
    "max_prefill_tokens": "--max-prefill-tokens",
    "chunked_prefill_size": "--chunked-prefill-size",
    "attention_backend": "--attention-backend",
    "mm_attention_backend": "--mm-attention-backend",
    "kv_cache_dtype": "--kv-cache-dtype",
    "quantization": "--quantization",
    "dtype": "--dtype",
    "random_seed": "--random-seed",
    "deterministic_inference": "--enable-deterministic-inference",
    "skip_tokenizer_init": "--skip-tokenizer-init",
    "disable_radix_cache": "--disable-radix-cache",
    "moe_a2a_backend": "--moe-a2a-backend",
    "moe_runner_backend": "--moe-runner-backend",
    "eplb": "--enable-eplb",
    "memory_saver": "--enable-memory-saver",
    "weights_cpu_backup": "--enable-weights-cpu-backup",
    "log_level": "--log-level",
    "metrics": "--enable-metrics",
}
"""Flag of each field."""


def rules_against_repeated_flags() -> list[dict[str, str]]:
    """Return the rules on ``engine``: no argument repeats a field, because SGLang would silently use the last value."""
    flag_rules = []
    for field, flag in FLAGS.items():
        info = EngineFlags.model_fields[field]
        name = str(info.alias)
        if info.default is True:
            # An argument that repeats the field's default is accepted.
            message = f"engine.{name} is false, but {flag} in engine.args says the opposite: leave one of them out."
            flag_rules.append(rule(f"self.{name} || !({sets_flag(flag)})", message, field=f".{name}"))
            continue
        given = f"self.{name}" if info.annotation is bool else f"has(self.{name})"
        message = f"engine.{name} and {flag} in engine.args say the same: leave one of them out."
        flag_rules.append(rule(f"!{given} || !({sets_flag(flag)})", message, field=f".{name}"))
    return flag_rules


LORA_FLAGS = ("--enable-lora", "--max-lora-rank", "--lora-target-modules", "--max-loras-per-batch", "--lora-backend", "--lora-paths")
"""Flags that ``lora`` sets."""

Module = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.]+$")]


class Adapter(ApiModel):
    """An adapter that every engine loads while it runs. A change of the list restarts no engine."""

    name: str = Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")
    """Name in requests: `lora_path` on `/generate`, `model: "<model>:<name>"` on chat and completions."""
    path: str = Field(min_length=1, max_length=4096, json_schema_extra=plain_path("engine.lora.adapters[].path"))
    """Path for SGLang's `/load_lora_adapter`. New contents need a new path."""


class Lora(ApiModel):
    """Adapters beside the model, all for the same base weights."""

    model_config = with_rules(
        rule(
            "!('all' in self.targetModules) || self.targetModules.size() == 1",
            "engine.lora.targetModules: all stands for every module, and SGLang ends when others are named beside it. Remove the"
            " others, or all.",
            field=".targetModules",
        )
    )

    enabled: bool = True
    """False: engines start without adapters and load none, and the list is kept. A change restarts the engines one by one."""
    max_rank: int = Field(ge=1, le=1024)
    """Largest rank of an adapter (`--max-lora-rank`). Engines reserve memory for it at their start."""
    target_modules: list[Module] = Field(min_length=1, max_length=32)
    """Modules that adapters may change (`--lora-target-modules`), for example `q_proj`, `v_proj`, or `all`."""
    max_per_batch: int | None = Field(default=None, ge=1, le=1024)
    """Maximum number of adapters that run at once (`--max-loras-per-batch`)."""
    backend: str | None = Field(default=None, max_length=64, pattern=_NAME)
    """Adapter kernels, for example `csgmv`, `triton` (`--lora-backend`)."""
    adapters: list[Adapter] = Field(default_factory=list, max_length=64, json_schema_extra=map_list())
    """Adapters that every engine loads."""

    def arguments(self) -> list[str]:
        """Return the flags for the start of an engine."""
        if not self.enabled:
            return []
        args = ["--enable-lora", "--max-lora-rank", str(self.max_rank), "--lora-target-modules", *self.target_modules]
        if self.max_per_batch is not None:
            args += ["--max-loras-per-batch", str(self.max_per_batch)]
        return [*args, "--lora-backend", self.backend] if self.backend is not None else args


def rule_of_expert_kernels() -> dict[str, str]:
    """Return SGLang's rule about expert kernels that run adapters (0.5.23, ``arg_groups/lora_hook.py``).

    SGLang itself checks the flags about adapters in ``engine.args``.
    """
    by_args = "has(self.args) && self.args.exists(a, a.startsWith('--enable-lora') || a.startsWith('--lora-paths'))"
    by_field = "self.lora.enabled && has(self.lora.backend) && self.lora.backend == 'triton_v2'"
    return rule(
        f"!has(self.moeRunnerBackend) || !self.moeRunnerBackend.startsWith('lora') || (has(self.lora) ? {by_field} : {by_args})",
        "engine.moeRunnerBackend of this kind runs adapters: set engine.lora, with backend triton_v2, or use another moeRunnerBackend.",
        field=".moeRunnerBackend",
    )


def rule_of_data_parallelism() -> dict[str, str]:
    """Return the rule that an engine with adapters has one copy of the model. With more copies SGLang loads no adapter while it runs."""
    message = (
        "engine.lora needs engine.parallelism.data of 1: with more SGLang loads no adapter while it runs. Use more engines (replicas)."
    )
    return rule("!has(self.lora) || !self.lora.enabled || self.parallelism.data == 1", message, field=".lora")


def rule_against_lora_flags() -> dict[str, str]:
    """Return the rule that no argument repeats ``lora``."""
    message = "engine.lora and flags of LoRA in engine.args say the same: leave one of them out."
    return rule(f"!has(self.lora) || !({sets_flag(*LORA_FLAGS)})", message, field=".lora")
