"""What a rollout needs of its cluster beyond plain Kubernetes, and what is said when it is not there. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sglang_rollout.controller.decide.sentences import sentence
from sglang_rollout.controller.render import quantity

Object = dict[str, Any]

_TRIED = timedelta(seconds=5)
_FAILED = " failed error: "
"""Before it the controller names pod and StatefulSet."""


@dataclass(frozen=True)
class LargestNode:
    """The node that has most of a resource."""

    name: str
    """Empty: there is no node."""
    amount: int


@dataclass(frozen=True)
class Cluster:
    """What was looked up. It is looked up only where it matters: for a rollout whose engines have no node yet."""

    queue_problem: str = ""
    """Why the queue that the rollout names does not exist, as a sentence."""
    queue_stopped: str = ""
    """Why the queue admits nobody, in Kueue's words."""
    gang_problem: str = ""
    """Why PodGroups cannot be made, as a sentence."""
    largest: LargestNode | None = None
    """The node with most GPUs; None: not known, for example because the operator may not list nodes."""
    uncreated: Mapping[str, str] = field(default_factory=dict)
    """Why pods of engines cannot be made, in their controller's words, by engine."""


def queue_problem(name: str, namespace: str, *, installed: bool) -> str:
    """Return why a queue cannot be waited in."""
    if not installed:
        return (
            f"spec.scheduling.queueName is {name}, and this cluster has no Kueue (no API group kueue.x-k8s.io): install it, or remove"
            " queueName."
        )
    return (
        f"spec.scheduling.queueName is {name}, and namespace {namespace} has no LocalQueue of that name: make it, or name one of"
        " `kubectl get localqueues`."
    )


def queue_stopped(local_queue: Object) -> str:
    """Return why a LocalQueue admits nobody; empty if it does."""
    conditions = (local_queue.get("status") or {}).get("conditions") or []
    active: Object = next((one for one in conditions if one.get("type") == "Active"), {})
    return str(active.get("message") or active.get("reason") or "") if active.get("status") == "False" else ""


def gang_problem(said: str = "") -> str:
    """Return why PodGroups cannot be made; ``said`` is the API server's refusal, if it knows them."""
    if said:
        return sentence(f"spec.scheduling.gang needs PodGroups, and the operator may not use them: {said}")
    return (
        "spec.scheduling.gang needs PodGroups (scheduling.x-k8s.io/v1alpha1), which this cluster does not know: install a scheduler"
        " with coscheduling and its definitions, or remove gang."
    )


def uncreated(events: Iterable[Object], engines: Mapping[str, Object]) -> dict[str, str]:
    """Return why pods of these StatefulSets cannot be made, by their Events of the reason FailedCreate.

    Not what ended after some seconds: what a pod needs may become known to the API server a moment after the StatefulSet.
    """
    found: dict[str, list[tuple[datetime, datetime, str]]] = {}
    for event in events:
        about, (first, last) = event.get("involvedObject") or {}, _times(event)
        live = engines.get(str(about.get("name")))
        if live is not None and about.get("uid") == live["metadata"].get("uid"):
            found.setdefault(live["metadata"]["name"], []).append((last, first, str(event.get("message"))))
    return {
        engine: max(told)[2].rpartition(_FAILED)[2]
        for engine, told in found.items()
        if max(told)[0] - min(first for _, first, _ in told) >= _TRIED
    }


def _times(event: Object) -> tuple[datetime, datetime]:
    """When it was told first, and when last; Events of another API have but one time."""
    once = event.get("eventTime") or (event.get("metadata") or {}).get("creationTimestamp")
    first, last = (datetime.fromisoformat(str(event.get(key) or once)) for key in ("firstTimestamp", "lastTimestamp"))
    return first, last


def largest_node(nodes: Iterable[Object], resource: str) -> LargestNode:
    """Return the node with the largest allocatable amount of ``resource``."""
    amounts = [(_amount(node, resource), str(node["metadata"]["name"])) for node in nodes]
    amount, name = max(amounts, default=(0, ""))
    return LargestNode(name, amount)


def _amount(node: Object, resource: str) -> int:
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    return int(quantity.parse(allocatable.get(resource)) or 0)
