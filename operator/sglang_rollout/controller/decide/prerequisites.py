"""What a rollout needs of its cluster beyond plain Kubernetes, and the message if it is missing. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sglang_rollout.api.pod_template import ENGINE_CONTAINER
from sglang_rollout.api.status import Reason
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.pods import Pod
from sglang_rollout.controller.render.common import parse_quantity
from sglang_rollout.kube.resources import Object
from sglang_rollout.wire.reasons import end_sentence

_MIN_ERROR_DURATION = timedelta(seconds=5)
_FAILED = " failed error: "
"""The StatefulSet controller names pod and StatefulSet before this text."""
_KUEUE_GATE_PREFIX = "kueue.x-k8s.io/"
_DEFAULT_SCHEDULER = "default-scheduler"


@dataclass(frozen=True)
class LargestNode:
    """The node with the largest amount of a resource."""

    name: str
    """Empty: the cluster has no node."""
    amount: int


@dataclass(frozen=True)
class Cluster:
    """Facts about the cluster. They are read only while they matter: for a rollout whose engines have no node yet."""

    queue_problem: str = ""
    """Why the queue named in the spec does not exist, as a sentence."""
    queue_stopped: str = ""
    """Why the queue admits no workload, quoting Kueue."""
    gang_problem: str = ""
    """Why PodGroups cannot be created, as a sentence."""
    tls_problem: str = ""
    """Why the Secret of ``security.tls`` cannot be used, as a sentence."""
    largest: LargestNode | None = None
    """The node with the most GPUs; None if unknown, for example because the operator may not list nodes."""
    creation_errors: Mapping[str, str] = field(default_factory=dict)
    """Why pods of engines or of the weight store cannot be created, quoting the StatefulSet controller, by StatefulSet."""


def describe_missing_queue(name: str, namespace: str, *, installed: bool) -> str:
    """Return why the LocalQueue ``name`` does not exist; ``installed`` is whether the cluster has Kueue."""
    if not installed:
        return (
            f"spec.scheduling.queueName is {name}, and this cluster has no Kueue (no API group kueue.x-k8s.io): install it, or remove"
            " queueName."
        )
    return (
        f"spec.scheduling.queueName is {name}, and namespace {namespace} has no LocalQueue of that name: create it, or name one of"
        " `kubectl get localqueues`."
    )


def find_queue_stop(local_queue: Object) -> str:
    """Return why a LocalQueue is stopped, quoting Kueue; empty if it is active."""
    conditions = (local_queue.get("status") or {}).get("conditions") or []
    active: Object = next((condition for condition in conditions if condition.get("type") == "Active"), {})
    return str(active.get("message") or active.get("reason") or "") if active.get("status") == "False" else ""


def describe_gang_problem(refusal: str = "") -> str:
    """Return why PodGroups cannot be created; ``refusal`` is the API server's message if it knows the kind."""
    if refusal:
        return end_sentence(f"spec.scheduling.gang needs PodGroups, and the operator may not use them: {refusal}")
    return (
        "spec.scheduling.gang needs PodGroups (scheduling.x-k8s.io/v1alpha1), which this cluster does not know: install a scheduler"
        " with coscheduling and its CRDs, or remove gang."
    )


def find_creation_errors(events: Iterable[Object], statefulsets: Iterable[Object]) -> dict[str, str]:
    """Return why pods of these StatefulSets cannot be created, from Events with the reason FailedCreate.

    Errors that ended within seconds are ignored, because objects that a pod needs may reach the API server a moment after the
    StatefulSet.
    """
    uids = {live["metadata"]["name"]: live["metadata"].get("uid") for live in statefulsets}
    found: dict[str, list[tuple[datetime, datetime, str]]] = {}
    for event in events:
        about, (first, last) = event.get("involvedObject") or {}, _event_times(event)
        name = str(about.get("name"))
        if name in uids and about.get("uid") == uids[name]:
            found.setdefault(name, []).append((last, first, str(event.get("message"))))
    return {
        engine: max(errors)[2].rpartition(_FAILED)[2]
        for engine, errors in found.items()
        if max(errors)[0] - min(first for _, first, _ in errors) >= _MIN_ERROR_DURATION
    }


def _event_times(event: Object) -> tuple[datetime, datetime]:
    """Return the first and the last time of an Event. Events of events.k8s.io have only one time."""
    once = event.get("eventTime") or (event.get("metadata") or {}).get("creationTimestamp")
    first, last = (datetime.fromisoformat(str(event.get(key) or once)) for key in ("firstTimestamp", "lastTimestamp"))
    return first, last


def find_largest_node(nodes: Iterable[Object], resource: str) -> LargestNode:
    """Return the node with the largest allocatable amount of ``resource``."""
    amounts = [(_allocatable(node, resource), str(node["metadata"]["name"])) for node in nodes]
    amount, name = max(amounts, default=(0, ""))
    return LargestNode(name, amount)


def explain_missing_node(pod: Pod, cluster: Cluster, rollout: SGLangRollout) -> tuple[Reason, str] | None:
    """Return why a pod has no node, where the default scheduler does not say it.

    Returns:
        Reason and message; None if the pod has a node, or if only the default scheduler can tell.
    """
    if pod.node:
        return None
    if too_large := _describe_oversize(pod, cluster, rollout.spec.engine.gpu_resource):
        return Reason.INSUFFICIENT_CAPACITY, too_large
    gates = [str(gate.get("name")) for gate in pod.spec.get("schedulingGates") or []]
    if any(gate.startswith(_KUEUE_GATE_PREFIX) for gate in gates):
        return Reason.WAITING_FOR_QUEUE, _describe_queueing(cluster, rollout.spec.scheduling.queue_name)
    if gates:
        return Reason.PODS_NOT_READY, f"its pod is held back by the scheduling gate {', '.join(gates)}."
    scheduler = str(pod.spec.get("schedulerName") or _DEFAULT_SCHEDULER)
    if scheduler != _DEFAULT_SCHEDULER and not pod.status.get("conditions"):
        return Reason.PODS_NOT_READY, f"no scheduler has looked at its pod yet; it waits for {scheduler}. Is that scheduler running?"
    return None


def _describe_queueing(cluster: Cluster, name: str | None) -> str:
    queue = f"queue {name}" if name else "its queue"
    if cluster.queue_stopped:
        return end_sentence(f"it waits in {queue}, which is stopped: {cluster.queue_stopped}")
    return f"it waits in {queue} until there is quota for all of its pods."


def _describe_oversize(pod: Pod, cluster: Cluster, gpu_resource: str) -> str:
    """Return the message for a pod that no node can ever take. Neither scheduler nor queue can tell this."""
    containers: list[Object] = pod.spec.get("containers") or []
    engine: Object = next((container for container in containers if container.get("name") == ENGINE_CONTAINER), {})
    asked = _amount(((engine.get("resources") or {}).get("limits") or {}).get(gpu_resource))
    largest = cluster.largest
    if largest is None or asked <= largest.amount:
        return ""
    if largest.amount == 0:
        return f"no node offers {gpu_resource} now. Is its device plugin running?"
    return (
        f"its pod asks for {asked} {gpu_resource}, and no node has so many: the largest, {largest.name}, has {largest.amount}."
        " Ask for fewer GPUs per pod, or add a larger node."
    )


def _allocatable(node: Object, resource: str) -> int:
    return _amount(((node.get("status") or {}).get("allocatable") or {}).get(resource))


def _amount(value: object) -> int:
    return int(parse_quantity(value) or 0)
