"""``spec.podTemplate`` and ``spec.router.podTemplate``: overlays over the engine pods and the router pod.

Fields that rules or renderers read are typed. All other fields of a pod pass through unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from sglang_rollout.api.schema import PRESERVE, ApiModel, map_list, rule, rules

ENGINE_CONTAINER = "engine"
GATE_CONTAINER = "gate"
AGENT_CONTAINER = "agent"
DOWNLOAD_CONTAINER = "download"
MODEL_VOLUME = "rollout-model"
CACHE_VOLUME = "rollout-cache"
PRIVATE_VOLUMES = ("rollout-gate", "rollout-agent", "rollout-authority", "control", "tmp")
"""Volumes of the engine pod that only gate and agent mount."""
STAGED_VOLUME = "rollout-staged"
PLUGIN_VOLUME = "rollout-plugin"
REPORTS_VOLUME = "rollout-reports"
VERDICTS_VOLUME = "rollout-verdicts"
SHARED_VOLUMES = (STAGED_VOLUME, PLUGIN_VOLUME, REPORTS_VOLUME, VERDICTS_VOLUME)
"""Volumes that agent and engine share."""
RESERVED_VOLUMES = ("run", *PRIVATE_VOLUMES, "shm", MODEL_VOLUME, CACHE_VOLUME, *SHARED_VOLUMES)
"""Volumes of the engine pod that belong to the operator."""

SMG_CONTAINER = "smg"
ROUTER_CONTAINERS = ("front", SMG_CONTAINER, "coordinator", "batches")
"""Containers of the router pod."""
ROUTER_VOLUMES = ("tmp", "rollout-coordinator", "control", "account", "trainer-token", "rollout-tls", "rollout-front")
"""Volumes of the router pod. All of them belong to the operator."""

Labels = Annotated[dict[str, Annotated[str, Field(max_length=65536)]], Field(json_schema_extra={"maxProperties": 64})]


def _no_command(template: str, container: str, fields: str) -> dict[str, str]:
    """Return the rule on a list of containers: it does not change the command of ``container``."""
    return rule(
        f"!self.exists(c, c.name == '{container}' && (has(c.command) || has(c.args) || has(c.image)))",
        f"{template} must not set command, args or image of the container {container}: use {fields}.",
    )


def _no_container(names: Iterable[str], message: str) -> dict[str, str]:
    """Return the rule on a list of containers: it contains none of ``names``."""
    return rule(f"!self.exists(c, c.name in {list(names)})", message)


def _not_set(message: str, *fields: str) -> dict[str, str]:
    """Return the rule on a pod's spec: it sets none of ``fields``."""
    return rule(" && ".join(f"!has(self.{name})" for name in fields), message)


_NO_SIDECARS = _no_container(
    (GATE_CONTAINER, AGENT_CONTAINER),
    "podTemplate must not change the containers gate and agent: they are the fence in front of the engine.",
)


def _containers(*list_rules: dict[str, str]) -> Any:
    return Field(default=None, max_length=16, json_schema_extra=map_list() | rules(*list_rules))


def _volumes(template: str, reserved: Iterable[str]) -> Any:
    message = f"{template} must not define the volumes {', '.join(reserved)}: they belong to the operator. Choose another name."
    no_reserved = rule(f"!self.exists(v, v.name in {list(reserved)})", message)
    return Field(default=None, max_length=64, json_schema_extra=map_list() | rules(no_reserved))


def overlay_sets(variables: Iterable[str]) -> str:
    """Return the CEL expression on ``spec`` for "the overlay of the container ``engine`` sets one of ``variables``"."""
    given = "has(self.podTemplate) && has(self.podTemplate.spec) && has(self.podTemplate.spec.containers)"
    named = f"c.name == '{ENGINE_CONTAINER}' && has(c.env) && c.env.exists(e, e.name in {list(variables)})"
    return f"({given} && self.podTemplate.spec.containers.exists(c, {named}))"


class Open(ApiModel):
    """An object whose other fields pass through unchanged."""

    model_config = ConfigDict(extra="allow", json_schema_extra={PRESERVE: True})


class OverlayVariable(Open):
    """An environment variable to add, or to merge into the variable of the same name."""

    name: str = Field(min_length=1, max_length=256)
    """Name of the variable."""


class OverlayContainer(Open):
    """A container to add, or to merge into the container of the same name."""

    name: str = Field(min_length=1, max_length=63)
    """Name of the container."""
    image: str | None = Field(default=None, max_length=1024)
    """Image of an added container."""
    command: list[Annotated[str, Field(max_length=65536)]] | None = Field(default=None, max_length=256)
    """Command of an added container."""
    args: list[Annotated[str, Field(max_length=65536)]] | None = Field(default=None, max_length=256)
    """Arguments of an added container."""
    env: list[OverlayVariable] | None = Field(default=None, max_length=128, json_schema_extra=map_list())
    """Environment variables to add."""


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

    containers: list[OverlayContainer] | None = _containers(
        _NO_SIDECARS, _no_command("podTemplate", ENGINE_CONTAINER, "spec.engine.image and spec.engine.args")
    )
    """Containers to add, or to merge by name. `engine` runs SGLang, and its variables must meet the rules of `engine.env`. Lists in a
    container are merged, too: `env` by name, `ports` by number, `volumeMounts` by path."""
    init_containers: list[OverlayContainer] | None = _containers(
        _NO_SIDECARS,
        _no_container(
            [ENGINE_CONTAINER], f"podTemplate must not make an init container of the name {ENGINE_CONTAINER}: the engine itself has it."
        ),
    )
    """Init containers to add. They run before gate and agent."""
    volumes: list[OverlayVolume] | None = _volumes("podTemplate", RESERVED_VOLUMES)
    """Volumes to add."""
    host_network: bool | None = None
    """Refused. Use `engine.network.hostNetwork`."""
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
    """Overlay over the engine pods."""

    metadata: OverlayMetadata | None = None
    """Labels and annotations of the engine pods."""
    spec: OverlayPodSpec | None = None
    """Fields of the pods' spec."""


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

    containers: list[OverlayContainer] | None = _containers(
        _no_container(
            [name for name in ROUTER_CONTAINERS if name != SMG_CONTAINER],
            "router.podTemplate must not change or remove the containers front, coordinator and batches: they serve the fleet's URL and"
            " lead weight updates. Use router.frontResources, router.coordinatorResources and router.batchesResources for CPU and memory.",
        ),
        _no_command("router.podTemplate", SMG_CONTAINER, "router.args"),
    )
    """Containers to add, or `smg`, the SGLang router, to merge into. Lists in a container are merged, too: `env` by name, `ports` by
    number, `volumeMounts` by path."""
    init_containers: list[OverlayContainer] | None = _containers(
        _no_container(
            ROUTER_CONTAINERS,
            f"router.podTemplate must not add an init container named {', '.join(ROUTER_CONTAINERS)}: the router's own containers have"
            " these names. Choose another name.",
        )
    )
    """Init containers to add."""
    volumes: list[OverlayVolume] | None = _volumes("router.podTemplate", ROUTER_VOLUMES)
    """Volumes to add."""
    host_network: bool | None = None
    """Refused, because two routers on one node would need the same ports."""
    host_pid: bool | None = Field(default=None, alias="hostPID")
    """Refused, because the front signals process 1 of its container."""
    share_process_namespace: bool | None = None
    """Refused, because the front signals process 1 of its container."""
    service_account_name: str | None = Field(default=None, max_length=253)
    """Refused, because the coordinator needs the rights of the router's own ServiceAccount."""
    service_account: str | None = Field(default=None, max_length=253)
    """Refused, as `serviceAccountName`."""
    automount_service_account_token: bool | None = None
    """Refused, because only the coordinator's container gets the token."""


class RouterPodTemplate(ApiModel):
    """Overlay over the router pod."""

    metadata: OverlayMetadata | None = None
    """Labels and annotations of the router pod."""
    spec: RouterOverlayPodSpec | None = None
    """Fields of the pod's spec."""
