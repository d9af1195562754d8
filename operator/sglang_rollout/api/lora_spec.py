"""``spec.engine.lora`` of an SGLangRollout: adapters beside the model."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from sglang_rollout.api.schema import ApiModel, rule, rules

FLAGS = ("--enable-lora", "--max-lora-rank", "--lora-target-modules", "--max-loras-per-batch", "--lora-backend", "--lora-paths")
"""What SGLang is told with ``lora``."""

Module = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.]+$")]


class Adapter(ApiModel):
    """One adapter that every engine loads while it runs. Changing the list restarts no engine."""

    name: str = Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")
    """Its name in requests: `lora_path` on `/generate`, `model: "<model>:<name>"` on chat and completions."""
    path: str = Field(min_length=1, max_length=4096)
    """Where engines find it, as SGLang's `/load_lora_adapter` takes it. New contents need a new path."""


class Lora(ApiModel):
    """Adapters beside the model, all for the same base weights."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!('all' in self.targetModules) || self.targetModules.size() == 1",
                "engine.lora.targetModules: all stands for every module, and SGLang ends when others are named beside it. Leave the"
                " others out, or all.",
                field=".targetModules",
            )
        )
    )

    enabled: bool = True
    """False: engines start without adapters and load none; the list is kept for later. Changing it rolls the engines."""
    max_rank: int = Field(ge=1, le=1024)
    """Largest rank of an adapter (`--max-lora-rank`). Memory is set aside for it at the start."""
    target_modules: list[Module] = Field(min_length=1, max_length=32)
    """Modules that adapters may change (`--lora-target-modules`), for example `q_proj`, `v_proj`, or `all`."""
    max_per_batch: int | None = Field(default=None, ge=1, le=1024)
    """So many adapters run at once (`--max-loras-per-batch`)."""
    backend: str | None = Field(default=None, max_length=64, pattern=r"^[a-z0-9][a-z0-9_-]*$")
    """Kernels of the adapters, for example `csgmv`, `triton` (`--lora-backend`)."""
    adapters: list[Adapter] = Field(
        default_factory=list,
        max_length=64,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """Adapters that every engine holds."""

    def arguments(self) -> list[str]:
        """The flags at the start of an engine."""
        if not self.enabled:
            return []
        args = ["--enable-lora", "--max-lora-rank", str(self.max_rank), "--lora-target-modules", *self.target_modules]
        if self.max_per_batch is not None:
            args += ["--max-loras-per-batch", str(self.max_per_batch)]
        return [*args, "--lora-backend", self.backend] if self.backend is not None else args


def adapters_in_experts() -> dict[str, str]:
    """The rule of SGLang (0.5.23, ``arg_groups/lora_hook.py``) about kernels of experts that run adapters. What ``engine.args`` say of
    adapters is left to SGLang."""
    by_args = "has(self.args) && self.args.exists(a, a.startsWith('--enable-lora') || a.startsWith('--lora-paths'))"
    by_field = "self.lora.enabled && has(self.lora.backend) && self.lora.backend == 'triton_v2'"
    return rule(
        f"!has(self.moeRunnerBackend) || !self.moeRunnerBackend.startsWith('lora') || (has(self.lora) ? {by_field} : {by_args})",
        "engine.moeRunnerBackend of this kind runs adapters: set engine.lora, with backend triton_v2, or use another moeRunnerBackend.",
        field=".moeRunnerBackend",
    )


def with_copies() -> dict[str, str]:
    """The rule: SGLang loads no adapter while it runs when it has several copies of the model."""
    message = (
        "engine.lora needs engine.parallelism.data of 1: with more SGLang loads no adapter while it runs. Use more engines (replicas)."
    )
    return rule("!has(self.lora) || !self.lora.enabled || self.parallelism.data == 1", message, field=".lora")


def said_in_args() -> dict[str, str]:
    """The rule: the field and arguments must not say the same. argparse takes an abbreviation for the flag, too."""
    in_args = f"self.args.exists(a, a.size() > 2 && a.startsWith('--') && {list(FLAGS)}.exists(f, f.startsWith(a.split('=')[0])))"
    message = "engine.lora and flags of LoRA in engine.args say the same: leave one of them out."
    return rule(f"!has(self.lora) || !(has(self.args) && {in_args})", message, field=".lora")
