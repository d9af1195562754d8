"""``spec.mode`` and ``spec.sharing`` of an SGLangRollout: the owner of the engines' GPUs."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from sglang_rollout.api.pod_template import Labels
from sglang_rollout.api.schema import ApiModel, rule, with_rules

ENGINE_INDEX = "{engine}"
"""Placeholder of an engine's index in the name of its claim."""
_CLAIM = r"^([a-z0-9]|\{engine\})(([-a-z0-9.]|\{engine\})*([a-z0-9]|\{engine\}))?$"


class Mode(StrEnum):
    """Owner of the engines' GPUs, and source of their weights."""

    STANDALONE = "Standalone"
    HYBRID = "Hybrid"
    COLOCATED = "Colocated"


class Sharing(ApiModel):
    """GPUs and nodes that engines share with the trainer."""

    model_config = with_rules(
        rule(
            "has(self.resourceClaimName) || has(self.trainerLabels)",
            "sharing needs resourceClaimName, trainerLabels, or both: the claim has the GPUs, the labels lead to the trainer's node.",
        )
    )

    resource_claim_name: str | None = Field(default=None, max_length=253, pattern=_CLAIM)
    """ResourceClaim (`resource.k8s.io`, Kubernetes 1.34) with the GPUs of an engine, in the namespace of this object. The trainer's pod
    names the same claim. `{engine}` is the index of the engine: `judge-gpus-{engine}`."""
    trainer_labels: Labels | None = Field(default=None, json_schema_extra={"minProperties": 1})
    """Labels of the trainer's pods, in the namespace of this object. Engines wait for such a pod and run on its node."""


def rules_of_modes() -> list[dict[str, str]]:
    """Return the rules of ``spec`` about what each mode needs and refuses."""
    return [
        rule(
            "self.mode == oldSelf.mode",
            "mode cannot change: engines that received weights from a trainer would wait for it forever. Create another object.",
            field=".mode",
        ),
        *_rules_of_shared_gpus(),
        rule(
            "self.mode != 'Colocated' || self.engine.weightsCpuBackup",
            "mode Colocated needs engine.weightsCpuBackup: the trainer takes the memory of the engines, and no trainer sends their weights"
            " again.",
            field=".engine",
        ),
        rule(
            f"self.mode != 'Colocated' || !has(self.weights) || ({_NO_TRANSPORT} && {_NO_CATCH_UP}"
            " && !has(self.weights.maxStaleness) && !has(self.weights.minCommitted))",
            "mode Colocated takes no weights: leave weights.transport, maxStaleness, minCommitted and catchUp.disk out.",
            field=".weights",
        ),
        *_rules_of_pushes_to_each(),
    ]


_NO_TRANSPORT = "(!has(self.weights.transport) || self.weights.transport == 'Distributed')"
_NO_CATCH_UP = "(!has(self.weights.catchUp) || !has(self.weights.catchUp.disk))"


def _rules_of_shared_gpus() -> list[dict[str, str]]:
    """Return the rules of modes Hybrid and Colocated."""
    return [
        rule(
            "(self.mode != 'Standalone') == has(self.sharing)",
            "sharing belongs to modes Hybrid and Colocated: set both, or neither.",
            field=".sharing",
        ),
        rule(
            "self.mode == 'Standalone' || self.engine.memorySaver",
            "modes Hybrid and Colocated need engine.memorySaver: the trainer takes the memory of the engines, and without it SGLang"
            " releases nothing.",
            field=".engine",
        ),
        rule(
            "self.mode == 'Standalone' || self.engine.gpuResource == ''",
            'modes Hybrid and Colocated need engine.gpuResource "": the GPUs are the trainer\'s, and an extended resource would take'
            " other GPUs. Name them by sharing.resourceClaimName.",
            field=".engine",
        ),
        rule(
            "self.mode == 'Standalone' || !self.engine.eplb",
            "modes Hybrid and Colocated cannot have engine.eplb: it moves experts between ranks, and engines are compared by checksum after"
            " they wake. Set eplb to false, or use mode Standalone.",
            field=".engine",
        ),
        rule(
            "self.mode == 'Standalone' || !has(self.engine.nodes) || self.engine.nodes == 1",
            "modes Hybrid and Colocated need engines of one pod: leave engine.nodes out.",
            field=".engine",
        ),
        rule(
            "self.mode == 'Standalone' || !has(self.engine.network) || !self.engine.network.hostNetwork",
            "modes Hybrid and Colocated cannot have engine.network.hostNetwork: agents name the trainer that calls, and in the network of a"
            " node no address proves that an agent does. Leave hostNetwork out.",
            field=".engine",
        ),
        rule(
            "self.replicas <= 1 || !has(self.sharing) || !has(self.sharing.resourceClaimName)"
            f" || self.sharing.resourceClaimName.contains('{ENGINE_INDEX}')",
            "sharing.resourceClaimName must contain {engine} when there are several engines: otherwise all would use the same GPUs.",
            field=".sharing",
        ),
    ]


def _rules_of_pushes_to_each() -> list[dict[str, str]]:
    """Return the rules of mode Hybrid, whose trainer sends tensors to each engine after every sleep."""
    return [
        rule(
            f"self.mode != 'Hybrid' || !has(self.weights) || {_NO_TRANSPORT}",
            "mode Hybrid takes tensors at the engines' own URLs: leave weights.transport out. update_weights_from_disk works, too.",
            field=".weights",
        ),
        rule(
            f"self.mode != 'Hybrid' || !has(self.weights) || {_NO_CATCH_UP}",
            "mode Hybrid needs no weights.catchUp.disk: engines wake without weights before each push, and would load older ones while"
            " the trainer sends new ones. Leave it out; the next push takes in an engine that restarted.",
            field=".weights",
        ),
        rule(
            "self.mode != 'Hybrid' || (self.engine.parallelism.pipeline == 1 && self.engine.parallelism.data == 1)",
            "mode Hybrid needs engine.parallelism.pipeline and data 1: SGLang takes handles for the ranks of one tensor-parallel group."
            " Use more engines (replicas) instead of data, and more tensor ranks instead of pipeline stages.",
            field=".engine",
        ),
        rule(
            "self.mode != 'Hybrid' || !has(self.elastic) || self.elastic.base >= self.replicas",
            "mode Hybrid needs all of its engines, because the trainer sends tensors to each engine: leave elastic out, or set"
            " elastic.base to replicas.",
            field=".elastic",
        ),
    ]
