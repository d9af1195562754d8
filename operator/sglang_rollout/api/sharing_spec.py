"""``spec.mode`` and ``spec.sharing`` of an SGLangRollout: whose GPUs the engines use."""

from __future__ import annotations

from enum import StrEnum

from pydantic import ConfigDict, Field

from sglang_rollout.api.pod_template import Labels
from sglang_rollout.api.schema import ApiModel, rule, rules

ENGINE_INDEX = "{engine}"
"""Stands for the number of an engine in the name of its claim."""
_CLAIM = r"^([a-z0-9]|\{engine\})(([-a-z0-9.]|\{engine\})*([a-z0-9]|\{engine\}))?$"


class Mode(StrEnum):
    """Whose GPUs the engines use, and who sends them weights."""

    STANDALONE = "Standalone"
    COLOCATED = "Colocated"


class Sharing(ApiModel):
    """How engines come to the GPUs of the trainer."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "has(self.resourceClaimName) || has(self.trainerLabels)",
                "sharing needs resourceClaimName, trainerLabels, or both: the claim has the GPUs, the labels lead to the trainer's node.",
            )
        )
    )

    resource_claim_name: str | None = Field(default=None, max_length=253, pattern=_CLAIM)
    """ResourceClaim (`resource.k8s.io`, Kubernetes 1.34) in the namespace of this object that holds the GPUs of an engine; the trainer's
    pod names the same one. `{engine}` is the number of the engine: `judge-gpus-{engine}`."""
    trainer_labels: Labels | None = Field(default=None, json_schema_extra={"minProperties": 1})
    """Labels of the trainer's pods, in the namespace of this object: engines go to nodes where one of them runs, and wait for it."""


def rules_of_modes() -> list[dict[str, str]]:
    """Rules of ``spec``: what each mode needs and refuses."""
    standalone = "self.mode == 'Standalone'"
    return [
        rule(
            "self.mode == oldSelf.mode",
            "mode cannot change: engines that took weights from a trainer would wait for them for ever. Make another object.",
            field=".mode",
        ),
        rule(
            "(self.mode == 'Colocated') == has(self.sharing)",
            "sharing belongs to mode Colocated: set both, or neither.",
            field=".sharing",
        ),
        rule(
            f"{standalone} || (self.engine.memorySaver && self.engine.weightsCpuBackup)",
            "mode Colocated needs engine.memorySaver and engine.weightsCpuBackup: the trainer takes the memory of the engines, and nobody"
            " sends them their weights again.",
            field=".engine",
        ),
        rule(
            f"{standalone} || self.engine.gpuResource == ''",
            'mode Colocated needs engine.gpuResource "": the GPUs are the trainer\'s, and an extended resource would take others. Name them'
            " by sharing.resourceClaimName.",
            field=".engine",
        ),
        rule(
            f"{standalone} || !has(self.engine.nodes) || self.engine.nodes == 1",
            "mode Colocated needs engines of one pod: leave engine.nodes out.",
            field=".engine",
        ),
        rule(
            f"{standalone} || !has(self.weights) || ((!has(self.weights.transport) || self.weights.transport == 'Distributed')"
            " && !has(self.weights.maxStaleness) && !has(self.weights.minCommitted)"
            " && (!has(self.weights.catchUp) || !has(self.weights.catchUp.disk)))",
            "mode Colocated takes no weights: leave weights.transport, maxStaleness, minCommitted and catchUp.disk out.",
            field=".weights",
        ),
        rule(
            "self.replicas <= 1 || !has(self.sharing) || !has(self.sharing.resourceClaimName)"
            f" || self.sharing.resourceClaimName.contains('{ENGINE_INDEX}')",
            "sharing.resourceClaimName must contain {engine} when there are several engines: else all of them would use the same GPUs.",
            field=".sharing",
        ),
    ]
