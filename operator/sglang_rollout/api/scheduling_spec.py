"""``spec.scheduling`` and ``spec.router.scheduling`` of an SGLangRollout: on which nodes pods run."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import ConfigDict, Field

from sglang_rollout.api.pod_template import Labels
from sglang_rollout.api.schema import PRESERVE, ApiModel, rule, rules

AT_ONCE_SECONDS = 60
"""What fails on a node within this time counts once: a node that boots anew ends all of its engines, and it has failed once."""
POD_GROUP_LABEL = "scheduling.x-k8s.io/pod-group"
"""Label of pods by which coscheduling knows their group."""
_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"


class TolerationOperator(StrEnum):
    """How a toleration compares its value."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class Toleration(ApiModel):
    """A taint that the pods tolerate, as in a Pod."""

    key: str | None = Field(default=None, max_length=316)
    """Key of the taint; none with operator `Exists`: every taint."""
    operator: TolerationOperator | None = None
    """`Equal` by default."""
    value: str | None = Field(default=None, max_length=63)
    """Value of the taint."""
    effect: str | None = Field(default=None, max_length=32)
    """`NoSchedule`, `PreferNoSchedule` or `NoExecute`; none: all of them."""
    toleration_seconds: int | None = None
    """How long `NoExecute` is borne."""


class Spread(StrEnum):
    """How engines are spread over nodes."""

    OFF = "Off"
    PREFERRED = "Preferred"
    REQUIRED = "Required"


class GangScope(StrEnum):
    """Which pods are scheduled together or not at all."""

    ENGINE = "Engine"
    BASE = "Base"


class Gang(ApiModel):
    """Pods that are scheduled together or not at all, by a scheduler that knows PodGroups
    (`scheduling.x-k8s.io/v1alpha1`, coscheduling)."""

    scope: GangScope = GangScope.ENGINE
    """`Engine`: the pods of one engine. Each engine gets a PodGroup of its own, so that the fleet may start with fewer engines than
    are wanted. `Base`: the pods of all engines of `elastic.base`, so that none of them starts before there is room for all; engines
    beyond the base are groups of their own."""
    scheduler: str = Field(default="scheduler-plugins-scheduler", min_length=1, max_length=253, pattern=_NAME)
    """Name of that scheduler (`schedulerName` of the pods)."""
    timeout_seconds: int = Field(default=60, ge=1, le=3600)
    """So long pods of a group that has not got room for all of them hold the room of those that did."""


class AvoidNodes(ApiModel):
    """When a node is avoided because engines fail there, and for how long."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self.forSeconds >= self.withinSeconds",
                "scheduling.avoidNodes.forSeconds must be at least withinSeconds: else the failures for which a node was avoided would"
                " have it avoided again at once.",
                field=".forSeconds",
            ),
            rule(
                f"self.withinSeconds > (self.failures - 1) * {AT_ONCE_SECONDS}",
                f"scheduling.avoidNodes.withinSeconds must be more than {AT_ONCE_SECONDS} for each failure after the first: what fails on a"
                " node within a minute counts once, and no node would ever be avoided. Use a longer time, or fewer failures.",
                field=".withinSeconds",
            ),
        )
    )

    failures: int = Field(default=3, ge=1, le=20)
    """So many failures of engines on one node have it avoided, if an engine of the same spec is up on a node without any. What fails
    within a minute counts once."""
    within_seconds: int = Field(default=3600, ge=60, le=86400)
    """How long a failure counts; more than 60 for each of `failures` after the first."""
    for_seconds: int = Field(default=3600, ge=60, le=604800)
    """How long the node is avoided."""


class Elastic(ApiModel):
    """A fleet that is whole with its first engines, and takes more where there is room."""

    base: int = Field(ge=1, le=1000)
    """The first so many engines are the base: `Ready` asks for them, and a fleet that has never taken weights waits for no more. The
    others come when there is room, and are the first to go when `replicas` shrinks."""
    priority_class_name: str | None = Field(default=None, min_length=1, max_length=253)
    """PriorityClass of the engines beyond the base, instead of `scheduling.priorityClassName`. With a lower one they are preempted
    first when others need the room, this fleet's base among them."""


class Placement(ApiModel):
    """On which nodes pods run."""

    node_selector: Labels | None = None
    """Labels that a node must have."""
    tolerations: list[Toleration] = Field(default_factory=list, max_length=64)
    """Taints that the pods tolerate."""
    affinity: dict[str, Any] | None = Field(default=None, json_schema_extra={PRESERVE: True})
    """Affinity, as in a Pod."""
    priority_class_name: str | None = Field(default=None, min_length=1, max_length=253)
    """PriorityClass of the pods."""


class Scheduling(Placement):
    """On which nodes engines run, and when. `router.scheduling` says it for the router."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.gang) || self.gang.scope != 'Base' || !has(self.queueName)",
                "scheduling.gang.scope Base cannot be used with queueName: Kueue admits each engine by itself, and those that it has"
                " admitted would hold their quota while they wait for the rest of the base. Leave gang out (in a queue each engine starts"
                " whole or not at all without it), or leave queueName out.",
                field=".gang",
            ),
            rule(
                "!has(self.avoidNodes) || !has(self.queueName)",
                "scheduling.avoidNodes cannot be used with queueName: Kueue does not let the affinity of an engine change that it has"
                " admitted. Leave one of them out.",
                field=".avoidNodes",
            ),
        )
    )

    topology_key: str | None = Field(default=None, min_length=1, max_length=317)
    """Label of nodes: all pods of one engine go to nodes with one value of it, for example one rack or one NVLink domain."""
    queue_name: str | None = Field(default=None, min_length=1, max_length=63, pattern=_NAME)
    """LocalQueue of Kueue, in the namespace of this object: every engine waits in it for its quota and starts as a whole."""
    gang: Gang | None = None
    """Schedule the pods of an engine, or of the base, together or not at all. For a cluster without Kueue; `gang: {}` takes the
    defaults."""
    spread_engines: Spread = Spread.OFF
    """`Preferred`: engines of this fleet go to different nodes where there is room. `Required`: never two on one node more than
    on another."""
    avoid_nodes: AvoidNodes | None = None
    """Keep engines off nodes on which engines failed repeatedly, for a while; `avoidNodes: {}` takes the defaults. Engines that run
    well on such a node stay there."""
