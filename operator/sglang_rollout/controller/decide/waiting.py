"""Why an engine's pod has no node yet, as far as others than the default scheduler have a say. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_rollout.api.conditions import Reason
from sglang_rollout.api.pod_template import ENGINE_CONTAINER
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.prerequisites import Cluster
from sglang_rollout.controller.decide.sentences import sentence
from sglang_rollout.controller.render import quantity

Object = dict[str, Any]

_KUEUE = "kueue.x-k8s.io/"
_DEFAULT = "default-scheduler"


def waits(pod: Object, cluster: Cluster, rollout: SGLangRollout) -> tuple[Reason, str] | None:
    """Return reason and sentence for a pod that has no node; None if it has one, or only the scheduler can say."""
    spec = pod.get("spec") or {}
    if spec.get("nodeName"):
        return None
    too_large = _never_fits(spec, cluster, rollout.spec.engine.gpu_resource)
    if too_large:
        return Reason.INSUFFICIENT_CAPACITY, too_large
    gates = [str(gate.get("name")) for gate in spec.get("schedulingGates") or []]
    if any(gate.startswith(_KUEUE) for gate in gates):
        return Reason.WAITING_FOR_QUEUE, _in_queue(cluster, rollout.spec.scheduling.queue_name)
    if gates:
        return Reason.PODS_NOT_READY, f"its pod is held back by the scheduling gate {', '.join(gates)}."
    scheduler = str(spec.get("schedulerName") or _DEFAULT)
    if scheduler != _DEFAULT and not (pod.get("status") or {}).get("conditions"):
        return Reason.PODS_NOT_READY, f"no scheduler has looked at its pod yet; it waits for {scheduler}. Does that run?"
    return None


def _in_queue(cluster: Cluster, name: str | None) -> str:
    queue = f"queue {name}" if name else "its queue"
    if cluster.queue_stopped:
        return sentence(f"it waits in {queue}, which admits nobody: {cluster.queue_stopped}")
    return f"it waits in {queue} until there is quota for all of its pods."


def _never_fits(spec: Mapping[str, Any], cluster: Cluster, gpu_resource: str) -> str:
    """Said before the scheduler or a queue say anything: neither knows that no node will ever do."""
    asked = _asked(spec, gpu_resource)
    largest = cluster.largest
    if largest is None or asked <= largest.amount:
        return ""
    if largest.amount == 0:
        return f"no node offers {gpu_resource} now. Is its device plugin running?"
    return (
        f"its pod asks for {asked} {gpu_resource}, and no node has so many: the largest, {largest.name}, has {largest.amount}."
        " Ask for fewer GPUs per pod, or add a larger node."
    )


def _asked(spec: Mapping[str, Any], gpu_resource: str) -> int:
    engine: Object = next((one for one in spec.get("containers") or [] if one.get("name") == ENGINE_CONTAINER), {})
    limits = (engine.get("resources") or {}).get("limits") or {}
    return int(quantity.parse(limits.get(gpu_resource)) or 0)
