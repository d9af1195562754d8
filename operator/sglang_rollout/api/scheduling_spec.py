"""``spec.scheduling`` of an SGLangRollout: on which nodes engines run."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field

from sglang_rollout.api.pod_template import Labels
from sglang_rollout.api.schema import PRESERVE, ApiModel


class TolerationOperator(StrEnum):
    """How a toleration compares its value."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class Toleration(ApiModel):
    """A taint of nodes that engines accept, as in a Pod."""

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


class Scheduling(ApiModel):
    """On which nodes engines run. The router goes anywhere."""

    node_selector: Labels | None = None
    """Labels that a node must have."""
    tolerations: list[Toleration] = Field(default_factory=list, max_length=64)
    """Taints of nodes that engines accept."""
    affinity: dict[str, Any] | None = Field(default=None, json_schema_extra={PRESERVE: True})
    """Affinity, as in a Pod."""
    priority_class_name: str | None = Field(default=None, min_length=1, max_length=253)
    """PriorityClass of the engines."""
    spread_engines: Spread = Spread.OFF
    """`Preferred`: engines of this fleet go to different nodes where there is room. `Required`: never two on one node more than
    on another."""
