"""Settings of SGLang that have a field of their own, and the flag of ``sglang.launch_server`` that each stands for.

Names of backends and types are not listed here: which of them exist is decided by the image. SGLang's own words about
one that it does not know appear in the engine's row of ``status``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from pydantic import Field

from sglang_rollout.api.schema import ApiModel, rule

_NAME = r"^[a-z0-9][a-z0-9_-]*$"

EP_SPANNING = (
    "megamoe",
    "deepep",
    "deepep_v2",
    "mooncake",
    "nixl",
    "ascend_fuseep",
    "flashinfer",
    "flashinfer_megamoe",
    "mori",
    "pplx",
)
"""All-to-all backends that make SGLang set its expert size to the tensor size (0.5.23, ``arg_groups/overrides.py``)."""
DETERMINISTIC = ("ascend", "fa3", "fa4", "flashinfer", "intel_xpu", "triton")
"""Attention backends that can be deterministic (0.5.23, ``arg_groups/attention_hook.py``)."""


class LogLevel(StrEnum):
    """How much an engine logs."""

    DEBUG = "Debug"
    INFO = "Info"
    WARNING = "Warning"
    ERROR = "Error"


class EngineKnobs(ApiModel):
    """Settings of the SGLang servers. What is left out is SGLang's own choice."""

    mem_fraction_static_percent: int | None = Field(default=None, ge=1, le=99)
    """Share of the GPU's memory for weights and KV cache, in percent (`--mem-fraction-static`, there a fraction)."""
    max_running_requests: int | None = Field(default=None, ge=1, le=1000000)
    """So many requests run at once; the others wait (`--max-running-requests`)."""
    context_length: int | None = Field(default=None, ge=1, le=100000000)
    """Tokens of prompt and completion together (`--context-length`). Default: what the model's config says."""
    max_prefill_tokens: int | None = Field(default=None, ge=1, le=100000000)
    """Tokens of one prefill batch (`--max-prefill-tokens`)."""
    chunked_prefill_size: int | None = Field(default=None, ge=-1, le=100000000)
    """Longer prompts are prefilled in chunks of so many tokens; -1: never (`--chunked-prefill-size`)."""
    attention_backend: str | None = Field(default=None, max_length=64, pattern=_NAME)
    """Kernels of attention, for example `fa3`, `flashinfer`, `triton` (`--attention-backend`)."""
    mm_attention_backend: str | None = Field(default=None, max_length=64, pattern=_NAME)
    """The same for images (`--mm-attention-backend`)."""
    kv_cache_dtype: str | None = Field(default=None, max_length=64, pattern=_NAME)
    """Type of the KV cache, for example `fp8_e5m2` (`--kv-cache-dtype`)."""
    quantization: str | None = Field(default=None, max_length=64, pattern=_NAME)
    """How weights are quantized, for example `fp8` (`--quantization`)."""
    dtype: str | None = Field(default=None, max_length=64, pattern=_NAME)
    """Type of weights and activations, for example `bfloat16` (`--dtype`)."""
    random_seed: int | None = Field(default=None, ge=0, le=2147483647)
    """Seed of sampling (`--random-seed`)."""
    deterministic_inference: bool = False
    """The same prompt gives the same logits in every batch (`--enable-deterministic-inference`)."""
    skip_tokenizer_init: bool = False
    """Token ids in, token ids out: the engine loads no tokenizer (`--skip-tokenizer-init`)."""
    disable_radix_cache: bool = False
    """Do not reuse the KV cache of common prefixes (`--disable-radix-cache`)."""
    moe_a2a_backend: str | None = Field(default=None, max_length=64, pattern=_NAME, alias="moeA2ABackend")
    """How experts exchange tokens, for example `deepep` (`--moe-a2a-backend`)."""
    moe_runner_backend: str | None = Field(default=None, max_length=64, pattern=_NAME)
    """Kernels of the experts, for example `triton` (`--moe-runner-backend`)."""
    eplb: bool = False
    """Move experts between GPUs by their load (`--enable-eplb`)."""
    memory_saver: bool = False
    """Memory can be released while the engine runs, for `state: Asleep` and trainers that share its GPUs (`--enable-memory-saver`)."""
    weights_cpu_backup: bool = False
    """Released weights are kept in host memory, so that a fleet that wakes serves at once (`--enable-weights-cpu-backup`)."""
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
"""By field."""


def same_said_twice() -> list[dict[str, str]]:
    """Rules: a field and an argument must not say the same. SGLang would take the last of the two without a word."""
    made = []
    for field, flag in FLAGS.items():
        info = EngineKnobs.model_fields[field]
        name = str(info.alias)
        # argparse takes an abbreviation for the flag, too.
        in_args = f"has(self.args) && self.args.exists(a, a.size() > 2 && a.startsWith('--') && '{flag}'.startsWith(a.split('=')[0]))"
        if info.default is True:
            # An argument that repeats the field's default is accepted.
            message = f"engine.{name} is false, but {flag} in engine.args says the opposite: leave one of them out."
            made.append(rule(f"self.{name} || !({in_args})", message, field=f".{name}"))
            continue
        given = f"self.{name}" if info.annotation is bool else f"has(self.{name})"
        message = f"engine.{name} and {flag} in engine.args say the same: leave one of them out."
        made.append(rule(f"!{given} || !({in_args})", message, field=f".{name}"))
    return made
