"""``spec.podTemplate`` and ``spec.router.podTemplate``: overlays over the engine pods and the router pod. Only what rules look at
is typed; the rest of a pod passes through."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from sglang_rollout.api.schema import PRESERVE, ApiModel, rule, rules

ENGINE_CONTAINER = "engine"
GATE_CONTAINER = "gate"
AGENT_CONTAINER = "agent"
DOWNLOAD_CONTAINER = "download"
MODEL_VOLUME = "rollout-model"
CACHE_VOLUME = "rollout-cache"
RESERVED_VOLUMES = ("run", "control", "tmp", "shm", MODEL_VOLUME, CACHE_VOLUME)
"""Volumes of the engine pod that belong to the operator."""

SMG_CONTAINER = "smg"
ROUTER_CONTAINERS = ("front", SMG_CONTAINER, "coordinator")
"""Containers of the router pod."""
ROUTER_VOLUMES = ("tmp", "control", "account")
"""Volumes of the router pod. All of them belong to the operator."""

Name = Annotated[str, Field(max_length=253)]
Labels = Annotated[dict[str, Annotated[str, Field(max_length=65536)]], Field(json_schema_extra={"maxProperties": 64})]

_SIDECARS = [GATE_CONTAINER, AGENT_CONTAINER]
_NOT_OURS = rule(
    f"!self.exists(c, c.name in {_SIDECARS})",
    "podTemplate must not change the containers gate and agent: they are the fence in front of the engine.",
)
_ENGINE_COMMAND = rule(
    f"!self.exists(c, c.name == '{ENGINE_CONTAINER}' && (has(c.command) || has(c.args) || has(c.image)))",
    "podTemplate must not set command, args or image of the container engine: use spec.engine.image and spec.engine.args.",
)
_NO_INIT_ENGINE = rule(
    f"!self.exists(c, c.name == '{ENGINE_CONTAINER}')",
    f"podTemplate must not make an init container of the name {ENGINE_CONTAINER}: the engine itself has it.",
)

_FRONT_AND_COORDINATOR = [name for name in ROUTER_CONTAINERS if name != SMG_CONTAINER]
_NOT_ROUTER_CONTAINERS = rule(
    f"!self.exists(c, c.name in {_FRONT_AND_COORDINATOR})",
    "router.podTemplate must not change or remove the containers front and coordinator: they serve the fleet's URL and lead weight"
    " updates. Use router.frontResources and router.coordinatorResources for CPU and memory.",
)
_SMG_COMMAND = rule(
    f"!self.exists(c, c.name == '{SMG_CONTAINER}' && (has(c.command) || has(c.args) || has(c.image)))",
    "router.podTemplate must not set command, args or image of the container smg: use router.args.",
)
_NO_INIT_ROUTER = rule(
    f"!self.exists(c, c.name in {list(ROUTER_CONTAINERS)})",
    f"router.podTemplate must not add an init container named {', '.join(ROUTER_CONTAINERS)}: the router's own containers have these"
    " names. Choose another name.",
)


def _not_set(message: str, *fields: str) -> dict[str, str]:
    """Return a rule of a pod's spec: none of ``fields`` is set."""
    return rule(" && ".join(f"!has(self.{name})" for name in fields), message)


def overlay_sets(variables: Iterable[str]) -> str:
    """Return the expression, about a rollout's spec, that the overlay gives the container ``engine`` one of these environment variables."""
    given = "has(self.podTemplate) && has(self.podTemplate.spec) && has(self.podTemplate.spec.containers)"
    named = f"c.name == '{ENGINE_CONTAINER}' && has(c.env) && c.env.exists(e, e.name in {list(variables)})"
    return f"({given} && self.podTemplate.spec.containers.exists(c, {named}))"


class Open(ApiModel):
    """An object whose further fields pass through unchanged."""

    model_config = ConfigDict(extra="allow", json_schema_extra={PRESERVE: True})


_MAP_LIST: dict[str, Any] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}


class OverlayVariable(Open):
    """An environment variable to add, or to merge into the one of the same name."""

    name: str = Field(min_length=1, max_length=256)
    """Name of the variable."""


class OverlayContainer(Open):
    """A container to add, or to merge into the one of the same name."""

    name: str = Field(min_length=1, max_length=63)
    """Name of the container. `engine` is the one that runs SGLang."""
    image: str | None = Field(default=None, max_length=1024)
    """Image of an added container."""
    command: list[Annotated[str, Field(max_length=65536)]] | None = Field(default=None, max_length=256)
    """Command of an added container."""
    args: list[Annotated[str, Field(max_length=65536)]] | None = Field(default=None, max_length=256)
    """Arguments of an added container."""
    env: list[OverlayVariable] | None = Field(default=None, max_length=128, json_schema_extra=_MAP_LIST)
    """Environment variables to add. Those of `engine` are bound by the same rules as `engine.env`."""


class OverlayVolume(Open):
    """A volume to add."""

    name: str = Field(min_length=1, max_length=63)
    """Name of the volume."""


class OverlayPodSpec(Open):
    """Fields of a pod's spec."""

    model_config = ConfigDict(
        json_schema_extra={PRESERVE: True}
        | rules(
            rule(
                "!has(self.hostNetwork)",
                "podTemplate must not set hostNetwork: all engines of a node would listen on the same ports. Use"
                " spec.engine.network.hostNetwork, which gives each engine ports of its own.",
                field=".hostNetwork",
            )
        )
    )

    containers: list[OverlayContainer] | None = Field(
        default=None, max_length=16, json_schema_extra=_MAP_LIST | rules(_NOT_OURS, _ENGINE_COMMAND)
    )
    """Containers to add or to merge by name. Lists inside a container merge by name too (env, ports, volumeMounts by
    mountPath)."""
    init_containers: list[OverlayContainer] | None = Field(
        default=None, max_length=16, json_schema_extra=_MAP_LIST | rules(_NOT_OURS, _NO_INIT_ENGINE)
    )
    """Init containers to add; they run before the gate and the agent."""
    volumes: list[OverlayVolume] | None = Field(
        default=None,
        max_length=64,
        json_schema_extra=_MAP_LIST
        | rules(
            rule(
                f"!self.exists(v, v.name in {list(RESERVED_VOLUMES)})",
                f"podTemplate must not define the volumes {', '.join(RESERVED_VOLUMES)}: they belong to the operator. Choose another name.",
            )
        ),
    )
    """Volumes to add."""
    host_network: bool | None = None
    """Refused: `engine.network.hostNetwork` does that."""
    service_account_name: str | None = Field(default=None, max_length=253)
    """ServiceAccount of the engine pods, instead of `<name>-engine`."""


class OverlayMetadata(ApiModel):
    """Labels and annotations of the pods."""

    labels: Labels | None = Field(
        default=None,
        json_schema_extra=rules(
            rule(
                "!self.exists(k, k.startsWith('rollout.sglang.io/') || k.startsWith('app.kubernetes.io/'))",
                "podTemplate must not set labels under rollout.sglang.io/ or app.kubernetes.io/: the operator finds its pods by them.",
            )
        ),
    )
    """Labels to add."""
    annotations: Labels | None = None
    """Annotations to add."""


class PodTemplate(ApiModel):
    """What to lay over the engine pods."""

    metadata: OverlayMetadata | None = None
    """Labels and annotations of the engine pods."""
    spec: OverlayPodSpec | None = None
    """Fields of the pods' spec."""


class RouterOverlayContainer(OverlayContainer):
    """A container to add, or `smg` to merge into."""

    name: str = Field(min_length=1, max_length=63)
    """Name of the container. `smg` is the SGLang router."""
    env: list[OverlayVariable] | None = Field(default=None, max_length=128, json_schema_extra=_MAP_LIST)
    """Environment variables to add."""


class RouterOverlayPodSpec(Open):
    """Fields of the router pod's spec."""

    model_config = ConfigDict(
        json_schema_extra={PRESERVE: True}
        | rules(
            _not_set(
                "router.podTemplate must not set hostNetwork: two routers on one node would need the same ports. Leave it out; the Service"
                " makes the router reachable.",
                "hostNetwork",
            ),
            _not_set(
                "router.podTemplate must not set hostPID or shareProcessNamespace: the front ends running requests by a signal to process 1"
                " of its container. Leave them out.",
                "hostPID",
                "shareProcessNamespace",
            ),
            _not_set(
                "router.podTemplate must not set serviceAccountName, serviceAccount or automountServiceAccountToken: the coordinator needs"
                " the rights of the router's own ServiceAccount. Use router.serviceAccountAnnotations to annotate that account.",
                "serviceAccountName",
                "serviceAccount",
                "automountServiceAccountToken",
            ),
        )
    )

    containers: list[RouterOverlayContainer] | None = Field(
        default=None, max_length=16, json_schema_extra=_MAP_LIST | rules(_NOT_ROUTER_CONTAINERS, _SMG_COMMAND)
    )
    """Containers to add, or `smg` to merge into. Lists inside a container merge by name too (env, ports, volumeMounts by
    mountPath)."""
    init_containers: list[RouterOverlayContainer] | None = Field(
        default=None, max_length=16, json_schema_extra=_MAP_LIST | rules(_NO_INIT_ROUTER)
    )
    """Init containers to add."""
    volumes: list[OverlayVolume] | None = Field(
        default=None,
        max_length=64,
        json_schema_extra=_MAP_LIST
        | rules(
            rule(
                f"!self.exists(v, v.name in {list(ROUTER_VOLUMES)})",
                f"router.podTemplate must not define the volumes {', '.join(ROUTER_VOLUMES)}: they belong to the operator. Choose another"
                " name.",
            )
        ),
    )
    """Volumes to add."""
    host_network: bool | None = None
    """Refused: two routers on one node would need the same ports."""
    host_pid: bool | None = Field(default=None, alias="hostPID")
    """Refused: the front signals process 1 of its container."""
    share_process_namespace: bool | None = None
    """Refused: the front signals process 1 of its container."""
    service_account_name: str | None = Field(default=None, max_length=253)
    """Refused: the coordinator needs the rights of the router's own ServiceAccount."""
    service_account: str | None = Field(default=None, max_length=253)
    """Refused, as `serviceAccountName`."""
    automount_service_account_token: bool | None = None
    """Refused: only the coordinator's container gets the token."""


class RouterPodTemplate(ApiModel):
    """Overlay over the router pod."""

    metadata: OverlayMetadata | None = None
    """Labels and annotations of the router pod."""
    spec: RouterOverlayPodSpec | None = None
    """Fields of the pod's spec."""
