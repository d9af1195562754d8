"""What to do about the reasons of conditions: the first sentence of each section of the page Conditions. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_rollout.api.status import Reason

ADVICE: Mapping[str, str] = {
    Reason.ALL_SERVING: "nothing.",
    Reason.BASE_SERVING: "nothing.",
    Reason.SCALED_TO_ZERO: "nothing, or raise replicas.",
    Reason.UPDATING_WEIGHTS: "nothing.",
    Reason.SUSPENDED: 'kubectl patch sglr NAME --type merge -p \'{"spec":{"state":"Active"}}\'.',
    Reason.PAUSED: "set spec.state to Active when the fleet is to generate again.",
    Reason.ASLEEP: "set spec.state to Active when the fleet is to generate again.",
    Reason.ASLEEP_FOR_TRAINER: "with Hybrid or Colocated nothing; the trainer wakes the engines.",
    Reason.TRAINER_LOST: "start a trainer, or POST /continue_generation at the URL.",
    Reason.PODS_NOT_READY: "wait; a large model loads for minutes.",
    Reason.INSUFFICIENT_CAPACITY: "follow the message: free GPUs, ask for fewer GPUs per pod, add a toleration.",
    Reason.CLAIM_UNAVAILABLE: (
        "create the claim that the message names, or correct its name in model.volume, engine.cache, sharing or podTemplate; for a claim"
        " without a volume see kubectl describe pvc."
    ),
    Reason.WAITING_FOR_QUEUE: "wait, or raise the quota.",
    Reason.QUEUE_NOT_FOUND: "follow the message.",
    Reason.GANG_NOT_POSSIBLE: "install coscheduling, or remove gang (Gangs).",
    Reason.ROUTER_NOT_READY: "follow the message; for a taint or a private registry see Place engines.",
    Reason.STORE_NOT_READY: "follow the message; the page The weight store has the steps for a pod that is Pending or out of memory.",
    Reason.IMAGE_PULL_FAILED: "correct the image, or its pull secret.",
    Reason.CREATE_FAILED: "correct the spec, or the object that the message names.",
    Reason.ENGINE_CRASHED: "kubectl logs NAME-engine-0-0 -c engine --previous has the whole log; correct the spec.",
    Reason.PLUGIN_MISSING: (
        "use a release of SGLang that the project supports (Compatibility); the log of the engine says why a plug-in or a hook was not"
        " loaded."
    ),
    Reason.RESTART_BUDGET_EXHAUSTED: (
        "correct the cause, which the message has; then delete the pods of the engine, or change the spec (Several nodes)."
    ),
    Reason.NAME_TAKEN: "delete that object, or rename the rollout.",
    Reason.ROUTER_PAUSED: "kubectl rollout resume deployment/NAME-router.",
    Reason.FIELDS_CONTESTED: (
        "exclude the rollout's objects (label rollout.sglang.io/rollout) from what the other client manages, and set in the SGLangRollout"
        " what you want, for example in podTemplate."
    ),
    Reason.APPLY_FAILED: "follow the quoted message.",
    Reason.INVALID_CERTIFICATE: "follow the message; the operator looks at the Secret again within 10 s (Encrypt the URL).",
    Reason.NOT_ALLOWED: "leave it out of the spec, or ask the administrator of the operator for the chart value that the message names.",
    Reason.INVALID_SPEC: "follow the message.",
    Reason.WAITING_FOR_WEIGHTS: "nothing; the trainer's next push includes them.",
    Reason.WEIGHTS_DIVERGED: "push again.",
    Reason.UPDATING: "nothing; if it stays, see Roll changed engines.",
    Reason.STORE_CRASHED: "follow the message; kubectl logs NAME-store-0 -c store --previous has the lines before it.",
    Reason.STORE_LACKS_VERSION: "nothing.",
    Reason.NOT_ENFORCED: (
        "install a network plugin that enforces NetworkPolicies, or set security.network: Open, which removes the policies."
    ),
    Reason.HOST_NETWORK: "restrict the ports of the nodes by other means, or set engine.network.hostNetwork: false.",
    Reason.UPDATE_FAILED: "push again; if the message says that the push lacks tensors, push with these tensors.",
    Reason.UPDATES_REFUSED: (
        "turn off what the message names, for example SGLANG_OPT_DEEPGEMM_HC_PRENORM=0 in the environment of the engine's container."
    ),
    Reason.PARTLY_COMMITTED: "nothing; the next complete push includes them, and with Staged they load their copies before it.",
    Reason.NODES_AVOIDED: "look at the node.",
    Reason.SNAPSHOT_FAILED: "follow the message; the weight store tries again after a minute and with the next version.",
}
"""By reason. NAME stands for the rollout."""


def advise(reason: str, name: str, namespace: str, engine: str = "") -> str:
    """Return what to do about a reason, with the names of a rollout and of the engine that has the reason; empty if nothing is known."""
    text = ADVICE.get(reason, "")
    named = text.replace("NAME-engine-0", engine) if engine else text
    return named.replace("kubectl ", f"kubectl -n {namespace} ").replace("NAME", name)
