"""``spec.elastic``, ``spec.scheduling`` and ``spec.router.scheduling`` of an SGLangRollout: where and when pods run."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field

from sglang_rollout.api.pod_template import Labels
from sglang_rollout.api.schema import PRESERVE, ApiModel, rule, with_rules

AT_ONCE_SECONDS = 60
"""Failures on a node within this time count once, because a node that reboots ends all of its engines."""
POD_GROUP_LABEL = "scheduling.x-k8s.io/pod-group"
"""Label by which coscheduling finds the PodGroup of a pod."""
_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"


class TolerationOperator(StrEnum):
    """Comparison of a toleration."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class Toleration(ApiModel):
    """A taint that the pods tolerate, as in a Pod."""

    key: str | None = Field(default=None, max_length=316)
    """Key of the taint. Without a key, operator `Exists` tolerates every taint."""
    operator: TolerationOperator | None = None
    """`Equal` (the default) or `Exists`."""
    value: str | None = Field(default=None, max_length=63)
    """Value of the taint."""
    effect: str | None = Field(default=None, max_length=32)
    """`NoSchedule`, `PreferNoSchedule` or `NoExecute`. Default: all of them."""
    toleration_seconds: int | None = None
    """Seconds for which `NoExecute` is tolerated."""


class Spread(StrEnum):
    """Distribution of engines over nodes."""

    OFF = "Off"
    PREFERRED = "Preferred"
    REQUIRED = "Required"


class GangScope(StrEnum):
    """Pods that are scheduled together or not at all."""

    ENGINE = "Engine"
    BASE = "Base"


class Gang(ApiModel):
    """Gang scheduling, by a scheduler with PodGroups (`scheduling.x-k8s.io/v1alpha1`, coscheduling)."""

    scope: GangScope = GangScope.ENGINE
    """`Engine`: each engine is a gang, so that the fleet may start with fewer engines than wanted. `Base`: the pods of all engines of
    `elastic.base` are one gang, which starts when there is room for all of them. Each surplus engine is a gang of its own."""
    scheduler: str = Field(default="scheduler-plugins-scheduler", min_length=1, max_length=253, pattern=_NAME)
    """Name of the scheduler (`schedulerName` of the pods)."""
    timeout_seconds: int = Field(default=60, ge=1, le=3600)
    """Seconds that scheduled pods of a gang keep their room while other pods of the gang have none."""


class AvoidNodes(ApiModel):
    """Avoidance of nodes on which engines fail."""

    model_config = with_rules(
        rule(
            "self.forSeconds >= self.withinSeconds",
            "scheduling.avoidNodes.forSeconds must be at least withinSeconds: otherwise the same failures would cause the node to be"
            " avoided again at once.",
            field=".forSeconds",
        ),
        rule(
            f"self.withinSeconds > (self.failures - 1) * {AT_ONCE_SECONDS}",
            f"scheduling.avoidNodes.withinSeconds must be more than {AT_ONCE_SECONDS} for each failure after the first: failures within"
            " a minute count once, so no node would ever be avoided. Use a longer time, or fewer failures.",
            field=".withinSeconds",
        ),
    )

    failures: int = Field(default=3, ge=1, le=20)
    """Failures of engines on a node after which it is avoided, if an engine of the same spec is up on a node without failures.
    Failures within a minute count once."""
    within_seconds: int = Field(default=3600, ge=60, le=86400)
    """Seconds for which a failure counts; more than 60 for each of `failures` after the first."""
    for_seconds: int = Field(default=3600, ge=60, le=604800)
    """Seconds for which a node is avoided."""


class Elastic(ApiModel):
    """A fleet that needs only its first engines, and runs further (surplus) engines where there is room."""

    base: int = Field(ge=1, le=1000)
    """Engines of the base: engine 0 and those that follow. `Ready` requires them, and so does a fleet's first weight update. Surplus
    engines start when there is room, and are removed first when `replicas` shrinks."""
    priority_class_name: str | None = Field(default=None, min_length=1, max_length=253)
    """PriorityClass of surplus engines, instead of `scheduling.priorityClassName`. With a lower priority they are preempted first, also
    by the base of this fleet."""


class Placement(ApiModel):
    """Nodes of the pods."""

    node_selector: Labels | None = None
    """Labels that a node must have."""
    tolerations: list[Toleration] = Field(default_factory=list, max_length=64)
    """Taints that the pods tolerate."""
    affinity: dict[str, Any] | None = Field(default=None, json_schema_extra={PRESERVE: True})
    """Affinity, as in a Pod."""
    priority_class_name: str | None = Field(default=None, min_length=1, max_length=253)
    """PriorityClass of the pods."""


class Scheduling(Placement):
    """Where and when engines run. `router.scheduling` is the same for the router."""

    model_config = with_rules(
        rule(
            "!has(self.gang) || self.gang.scope != 'Base' || !has(self.queueName)",
            "scheduling.gang.scope Base cannot be used with queueName: Kueue admits each engine by itself, and admitted engines would"
            " hold their quota while they wait for the rest of the base. Leave gang out (in a queue each engine starts"
            " whole or not at all without it), or leave queueName out.",
            field=".gang",
        ),
        rule(
            "!has(self.avoidNodes) || !has(self.queueName)",
            "scheduling.avoidNodes cannot be used with queueName: Kueue allows no change of the affinity of an engine that it has"
            " admitted. Leave one of them out.",
            field=".avoidNodes",
        ),
    )

    topology_key: str | None = Field(default=None, min_length=1, max_length=317)
    """Label of nodes. All pods of an engine run on nodes with the same value, for example in one rack or one NVLink domain."""
    queue_name: str | None = Field(default=None, min_length=1, max_length=63, pattern=_NAME)
    """LocalQueue of Kueue, in the namespace of this object. Each engine waits there for its quota and starts as a whole."""
    gang: Gang | None = None
    """Schedule the pods of an engine, or of the base, together or not at all. For clusters without Kueue. `gang: {}` takes the
    defaults."""
    spread_engines: Spread = Spread.OFF
    """`Preferred`: spread the engines of this fleet over nodes where there is room. `Required`: the numbers of engines on any two
    nodes never differ by more than one."""
    avoid_nodes: AvoidNodes | None = None
    """Keep new engine pods off nodes on which engines failed repeatedly, for a limited time. `avoidNodes: {}` takes the defaults.
    Engines that run on such a node stay there."""
