"""``engine.network``, ``engine.rdma``, ``engine.cache``, and the environment variables that fields set."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from pydantic import Field

from sglang_rollout.api.pod_template import overlay_sets
from sglang_rollout.api.schema import ApiModel, plain_path, rule, sets_flag, with_rules

BLOCK = 20
"""Ports of one engine in the network of its node (:func:`sglang_rollout.controller.render.names.engine_ports`)."""
BASE_PORT = 20000
"""Default start of the blocks, above the ports of kubelets and most daemons."""
NODE_PORTS = 30000
"""First port that Kubernetes gives to Services of type NodePort (its default). Linux uses higher ports for outgoing connections."""
UNPRIVILEGED = 1024
"""Lowest port of a gate, which runs without privileges."""

ABSOLUTE = r"^(/[^/:]+)+$"
"""An absolute path without a trailing slash, and without a colon, which separates paths of a list."""


class NcclDebug(StrEnum):
    """How much NCCL logs."""

    VERSION = "Version"
    WARN = "Warn"
    INFO = "Info"
    TRACE = "Trace"


class Network(ApiModel):
    """Network devices of engines and of the trainer's process group. NCCL and gloo choose what is left out."""

    model_config = with_rules(
        rule(
            "!has(self.basePort) || self.hostNetwork",
            "engine.network.basePort needs hostNetwork: a pod with a network of its own has all ports to itself.",
            field=".basePort",
        ),
        rule(
            f"!has(self.basePort) || self.basePort % {BLOCK} == 0",
            f"engine.network.basePort must be a multiple of {BLOCK}, the ports of one engine, so that the scheduler can"
            " distinguish fleets on one node.",
            field=".basePort",
        ),
    )

    host_network: bool = False
    """Engine pods use the network of their node. Each engine has its own ports, so that several fit on one node."""
    base_port: int | None = Field(default=None, ge=UNPRIVILEGED, le=NODE_PORTS - BLOCK)
    """With `hostNetwork`, engine i uses the 20 ports from `basePort + 20 * i` on. A multiple of 20; all ports must be below 30000.
    Default: 20000."""
    interface: str | None = Field(default=None, max_length=256, pattern=r"^[A-Za-z0-9_.-]+(,[A-Za-z0-9_.-]+)*$")
    """Network interface, by its exact name in the pod, or on the node with `hostNetwork` (`NCCL_SOCKET_IFNAME`, `GLOO_SOCKET_IFNAME`)."""
    ib_hca: str | None = Field(default=None, max_length=1024, pattern=r"^[\^=]{0,2}[A-Za-z0-9_.:-]+(,[A-Za-z0-9_.:-]+)*$")
    """InfiniBand or RoCE adapters, for example `mlx5_0,mlx5_1` (`NCCL_IB_HCA`)."""
    ib_gid_index: int | None = Field(default=None, ge=0, le=255)
    """Index of the GID that RoCE uses (`NCCL_IB_GID_INDEX`)."""
    nccl_cumem: bool | None = None
    """NCCL allocates with cuMem (`NCCL_CUMEM_ENABLE`). The trainer must use the same value. SGLang's default is false."""
    nccl_debug: NcclDebug | None = None
    """How much NCCL logs (`NCCL_DEBUG`)."""

    @property
    def first_port(self) -> int:
        """The first port of engine 0, with ``host_network``."""
        return BASE_PORT if self.base_port is None else self.base_port


class Rdma(ApiModel):
    """RDMA devices of each engine pod. They add the capability `IPC_LOCK`, which registering memory needs."""

    resource: str = Field(min_length=1, max_length=253, pattern=r"^[a-z0-9.-]+/[A-Za-z0-9_.-]+$")
    """Extended resource of the device plugin, for example `rdma/hca_shared_devices_a`."""
    count: int = Field(default=1, ge=1, le=64)
    """Number of devices."""


class Cache(ApiModel):
    """Storage of compiled kernels between pods. Either `hostPath` or `claim`."""

    model_config = with_rules(
        rule(
            "has(self.hostPath) != has(self.claim)",
            "engine.cache takes either hostPath or claim.",
        )
    )

    host_path: str | None = Field(default=None, max_length=1024, pattern=ABSOLUTE, json_schema_extra=plain_path("engine.cache.hostPath"))
    """Folder of the node. It is created if it does not exist."""
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
"""Folder below the cache's mount, by SGLang's variable. All variables are set, because an image may have set some."""

MEMORY_CHECK = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
"""Spelled as in SGLang (0.5.23, ``srt/environ.py``)."""

OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Variables that ``model.offline`` sets."""

NETWORK_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "interface": ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
    "ib_hca": ("NCCL_IB_HCA",),
    "ib_gid_index": ("NCCL_IB_GID_INDEX",),
    "nccl_cumem": ("NCCL_CUMEM_ENABLE",),
    "nccl_debug": ("NCCL_DEBUG",),
}
"""Variables, by field of ``engine.network``."""


def _fields_with_variables(engine: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """Return for each field with variables: the CEL expression for "it is set", the start of a message, and the variables."""
    fields = [
        (f"!{engine}.checkMemoryBalance", "checkMemoryBalance", (MEMORY_CHECK,)),
        (f"has({engine}.cache)", "cache", tuple(CACHE_VARIABLES)),
    ]
    for field, variables in NETWORK_VARIABLES.items():
        alias = str(Network.model_fields[field].alias)
        fields.append((f"has({engine}.network) && has({engine}.network.{alias})", f"network.{alias}", variables))

    def message(name: str, variables: tuple[str, ...]) -> str:
        return f"engine.{name} sets {', '.join(variables)}: leave {'it' if len(variables) == 1 else 'them'} out of"

    return [(is_set, message(name, variables), variables) for is_set, name, variables in fields]


def rules_against_repeated_variables() -> list[dict[str, str]]:
    """Return the rules on ``engine``: ``env`` repeats no field, because the pod would silently get one of the two values."""
    return [
        rule(f"!({is_set}) || !has(self.env) || !self.env.exists(e, e.name in {list(variables)})", f"{start} engine.env.", field=".env")
        for is_set, start, variables in _fields_with_variables("self")
    ]


def rules_against_overlaid_variables() -> list[dict[str, str]]:
    """Return the rules on ``spec``: the overlay of the engine's container repeats no field."""
    return [
        rule(f"!({is_set}) || !{overlay_sets(variables)}", f"{start} the container engine of podTemplate.", field=".podTemplate")
        for is_set, start, variables in _fields_with_variables("self.engine")
    ]


PORT_FLAGS = (
    "--nccl-port",
    "--grpc-port",
    "--grpc-http-sidecar-port",
    "--smg-http-sidecar-port",
    "--gated-launch-port",
    "--engine-info-bootstrap-port",
    "--encoder-bootstrap-port",
    "--load-publish-endpoint",
    "--decoupled-spec-bind-endpoint",
    "--kv-events-config",
)
"""Flags for further ports on which SGLang listens."""


def _base(engine: str) -> str:
    return f"(has({engine}.network.basePort) ? {engine}.network.basePort : {BASE_PORT})"


def _on_node(engine: str) -> str:
    return f"(has({engine}.network) && {engine}.network.hostNetwork)"


def rules_of_engine_ports() -> list[dict[str, str]]:
    """Return the rules on ``engine``: with ``hostNetwork``, SGLang listens only on the ports of its block."""
    return [
        rule(
            f"!{_on_node('self')} || self.parallelism.data == 1",
            "engine.network.hostNetwork needs engine.parallelism.data 1: SGLang looks for ports of such copies itself, and could take"
            " those of another engine. Use more engines (replicas) instead.",
            field=".network",
        ),
        rule(
            f"!{_on_node('self')} || !({sets_flag(*PORT_FLAGS)})",
            f"With engine.network.hostNetwork leave {', '.join(PORT_FLAGS)} out of engine.args: all engines of a node would get the same"
            " port.",
            field=".args",
        ),
    ]


def rules_of_fleet_ports() -> list[dict[str, str]]:
    """Return the rules on ``spec``: all blocks fit, and new blocks do not overlap blocks in use."""
    now, before = _base("self.engine"), _base("oldSelf.engine")
    return [
        rule(
            f"!{_on_node('self.engine')} || {now} + {BLOCK} * self.replicas <= {NODE_PORTS}",
            f"engine.network.basePort + {BLOCK} * replicas must not exceed {NODE_PORTS}: Kubernetes and Linux give the ports above to"
            " other programs. Use a lower basePort, or fewer engines.",
            field=".engine",
        ),
        rule(
            f"self.state == 'Suspended' || oldSelf.state == 'Suspended' || !{_on_node('self.engine')} || !{_on_node('oldSelf.engine')}"
            f" || {now} == {before} || {now} >= {before} + {BLOCK} * oldSelf.replicas || {now} + {BLOCK} * self.replicas <= {before}",
            "engine.network.basePort can only move past all ports that engines use now, because engines restart one by one and would wait"
            " for each other's ports. Move it further, or set state to Suspended first.",
            field=".engine",
        ),
    ]
