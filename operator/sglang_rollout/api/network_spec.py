"""``engine.network``, ``engine.rdma`` and ``engine.cache``, and the environment variables that typed fields stand for."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from pydantic import ConfigDict, Field

from sglang_rollout.api.schema import ApiModel, rule, rules

ABSOLUTE = r"^(/[^/:]+)+$"
"""An absolute path without a slash at its end; a colon would be taken for a list of paths."""


class NcclDebug(StrEnum):
    """How much NCCL logs."""

    VERSION = "Version"
    WARN = "Warn"
    INFO = "Info"
    TRACE = "Trace"


class Network(ApiModel):
    """Over which devices engines and the trainer's group talk. What is left out is found by NCCL and gloo themselves."""

    interface: str | None = Field(default=None, max_length=256, pattern=r"^[A-Za-z0-9_.-]+(,[A-Za-z0-9_.-]+)*$")
    """Network interface, by its exact name in the pod (`NCCL_SOCKET_IFNAME`, `GLOO_SOCKET_IFNAME`)."""
    ib_hca: str | None = Field(default=None, max_length=1024, pattern=r"^[\^=]{0,2}[A-Za-z0-9_.:-]+(,[A-Za-z0-9_.:-]+)*$")
    """InfiniBand or RoCE adapters, for example `mlx5_0,mlx5_1` (`NCCL_IB_HCA`)."""
    ib_gid_index: int | None = Field(default=None, ge=0, le=255)
    """Index of the GID that RoCE uses (`NCCL_IB_GID_INDEX`)."""
    nccl_cumem: bool | None = None
    """Whether NCCL allocates with cuMem (`NCCL_CUMEM_ENABLE`). The trainer must use the same value; SGLang's own is false."""
    nccl_debug: NcclDebug | None = None
    """How much NCCL logs (`NCCL_DEBUG`)."""


class Rdma(ApiModel):
    """RDMA devices of each engine pod. Adds the capability `IPC_LOCK`, without which no memory can be registered."""

    resource: str = Field(min_length=1, max_length=253, pattern=r"^[a-z0-9.-]+/[A-Za-z0-9_.-]+$")
    """Extended resource of the device plugin, for example `rdma/hca_shared_devices_a`."""
    count: int = Field(default=1, ge=1, le=64)
    """How many of it."""


class Cache(ApiModel):
    """Where compiled kernels are kept between pods. One of `hostPath` and `claim`."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("has(self.hostPath) != has(self.claim)", "engine.cache takes exactly one of hostPath and claim."),
        )
    )

    host_path: str | None = Field(default=None, max_length=1024, pattern=ABSOLUTE)
    """Folder of the node; made if it is not there."""
    claim: str | None = Field(default=None, min_length=1, max_length=253)
    """PersistentVolumeClaim in the namespace of this object. Engines on several nodes need one that many nodes can write."""


CACHE_VARIABLES: Mapping[str, str] = {
    "SGLANG_CACHE_DIR": "",
    "SGLANG_JIT_CACHE_DIR": "/jit",
    "TRITON_CACHE_DIR": "/triton",
    "TORCHINDUCTOR_CACHE_DIR": "/inductor",
    "TORCH_EXTENSIONS_DIR": "/torch_extensions",
    "CUDA_CACHE_PATH": "/nv",
    "TILELANG_CACHE_DIR": "/tilelang",
    "FLASHINFER_WORKSPACE_BASE": "",
}
"""Variable, and the folder below the cache's mount. The names are SGLang's own; they are all set, because an image may have set one."""

MEMORY_CHECK = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
"""As SGLang spells it (0.5.23, ``srt/environ.py``)."""

OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""What ``model.offline`` sets."""

NETWORK_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "interface": ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
    "ib_hca": ("NCCL_IB_HCA",),
    "ib_gid_index": ("NCCL_IB_GID_INDEX",),
    "nccl_cumem": ("NCCL_CUMEM_ENABLE",),
    "nccl_debug": ("NCCL_DEBUG",),
}
"""By field of ``engine.network``."""


def variable_said_twice() -> list[dict[str, str]]:
    """Rules of ``engine``: a field and ``env`` must not say the same. The pod would get one of the two without a word."""
    said = [
        ("!self.checkMemoryBalance", "checkMemoryBalance", (MEMORY_CHECK,)),
        ("has(self.cache)", "cache", tuple(CACHE_VARIABLES)),
    ]
    for field, variables in NETWORK_VARIABLES.items():
        alias = str(Network.model_fields[field].alias)
        said.append((f"has(self.network) && has(self.network.{alias})", f"network.{alias}", variables))
    return [
        rule(
            f"!({given}) || !has(self.env) || !self.env.exists(e, e.name in {list(variables)})",
            f"engine.{name} sets {', '.join(variables)}: leave {'it' if len(variables) == 1 else 'them'} out of engine.env.",
            field=".env",
        )
        for given, name, variables in said
    ]
