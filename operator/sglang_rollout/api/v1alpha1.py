"""``rollout.sglang.io/v1alpha1`` SGLangRollout: names of the API and the root model."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from sglang_rollout.api.schema import ApiModel, rule, rules
from sglang_rollout.api.spec import RolloutSpec
from sglang_rollout.api.status import RolloutStatus

GROUP = "rollout.sglang.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "SGLangRollout"
LIST_KIND = "SGLangRolloutList"
PLURAL = "sglangrollouts"
SINGULAR = "sglangrollout"
SHORT_NAME = "sglr"

MAX_NAME = 40
"""Longest name of an SGLangRollout: ``<name>-engine-<4 digits>`` and the hash that a StatefulSet appends must fit a
label (63)."""

PRINTER_COLUMNS: tuple[dict[str, Any], ...] = (
    {
        "name": "READY",
        "type": "string",
        "jsonPath": ".status.ready",
        "description": "Engines that serve, of those wanted.",
    },
    {
        "name": "UP-TO-DATE",
        "type": "integer",
        "jsonPath": ".status.updatedReplicas",
        "description": "Engines whose pod was made from the current spec.",
    },
    {
        "name": "VERSION",
        "type": "string",
        "jsonPath": ".status.weights.committedVersion",
        "description": "Weight version that the fleet serves.",
    },
    {
        "name": "STALE",
        "type": "integer",
        "jsonPath": ".status.weights.stale",
        "description": "Engines that are up and do not hold that version.",
    },
    {
        "name": "STATE",
        "type": "string",
        "jsonPath": ".spec.state",
        "description": "What the fleet is to do.",
    },
    {
        "name": "STATUS",
        "type": "string",
        "jsonPath": '.status.conditions[?(@.type=="Ready")].reason',
        "description": "Reason of the condition Ready.",
    },
    {"name": "AGE", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    {"name": "BASE", "type": "integer", "jsonPath": ".status.base", "priority": 1},
    {"name": "RUN", "type": "integer", "jsonPath": ".status.weights.run", "priority": 1},
    {"name": "SKEW", "type": "integer", "jsonPath": ".status.weights.skew", "priority": 1},
    {"name": "EPOCH", "type": "integer", "jsonPath": ".status.weights.epoch", "priority": 1},
    {"name": "URL", "type": "string", "jsonPath": ".status.endpoints.url", "priority": 1},
)
"""What ``kubectl get`` shows; priority 1 only with ``-o wide``."""


class ObjectMeta(ApiModel):
    """The part of ``metadata`` that the operator uses."""

    name: str
    """Name of the object."""
    namespace: str = "default"
    """Its namespace."""
    uid: str = ""
    """Identity of this very object."""
    generation: int = 0
    """Grows with every change of ``spec``."""


class SGLangRollout(ApiModel):
    """A fleet of SGLang engines behind one URL, for reinforcement learning: generate through it, push policy weights
    through it."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                f"self.metadata.name.size() <= {MAX_NAME}",
                f"metadata.name must have at most {MAX_NAME} characters, because the names of engines are derived from it.",
            ),
            rule(
                "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                "metadata.name must begin with a letter and consist of lower-case letters, digits and hyphens, because"
                " Services are named after it.",
            ),
        )
    )

    api_version: str = API_VERSION
    """Always `rollout.sglang.io/v1alpha1`."""
    kind: str = KIND
    """Always `SGLangRollout`."""
    metadata: ObjectMeta
    """Name, namespace and the rest of every Kubernetes object's metadata."""
    spec: RolloutSpec
    """The fleet that is wanted."""
    status: RolloutStatus | None = Field(default=None)
    """What is. Written by the operator."""

    @property
    def name(self) -> str:
        """The object's name."""
        return self.metadata.name

    @property
    def namespace(self) -> str:
        """The object's namespace."""
        return self.metadata.namespace
