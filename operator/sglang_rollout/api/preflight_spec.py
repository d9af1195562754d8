"""``spec.engine.preflight`` of an SGLangRollout: what is measured before SGLang starts."""

from __future__ import annotations

from pydantic import Field

from sglang_rollout.api.schema import ApiModel


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
