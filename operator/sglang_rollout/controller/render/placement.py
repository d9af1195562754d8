"""Where and when pods run: ``scheduling`` of engines and router as fields of pods, labels for Kueue, and PodGroups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_rollout.api.scheduling_spec import GangScope, Placement, Spread
from sglang_rollout.api.sharing_spec import ENGINE_INDEX
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.api.weights_spec import Store
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.common import Object, child
from sglang_rollout.kube.resources import POD_GROUPS

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_NODE = "kubernetes.io/hostname"
CLAIM = "shared-gpus"
"""Name in the pod of the claim that it shares with the trainer."""
_UNSATISFIABLE = {Spread.PREFERRED: "ScheduleAnyway", Spread.REQUIRED: "DoNotSchedule"}


def pod_placement(rollout: SGLangRollout, engine: int) -> Object:
    """Return the scheduling fields of the spec of an engine's pods, without empty fields."""
    scheduling, elastic = rollout.spec.scheduling, rollout.spec.elastic
    surplus = elastic.priority_class_name if elastic and engine >= elastic.base else None
    affinity = _add_affinity_terms(scheduling.affinity, _affinity_terms(rollout, engine))
    fields = _placement(scheduling, affinity, surplus or scheduling.priority_class_name)
    if scheduling.gang:
        fields["schedulerName"] = scheduling.gang.scheduler
    if scheduling.spread_engines is not Spread.OFF:
        fields["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": _NODE,
                "whenUnsatisfiable": _UNSATISFIABLE[scheduling.spread_engines],
                "labelSelector": {"matchLabels": names.selector(rollout.name, names.COMPONENT_ENGINE)},
            }
        ]
    sharing = rollout.spec.sharing
    if sharing is not None and sharing.resource_claim_name:
        claim = sharing.resource_claim_name.replace(ENGINE_INDEX, str(engine))
        fields["resourceClaims"] = [{"name": CLAIM, "resourceClaimName": claim}]
    return fields


def router_placement(rollout: SGLangRollout) -> Object:
    """Return the fields of the router pod's spec that say where it may run."""
    scheduling = rollout.spec.router.scheduling
    return _placement(scheduling, scheduling.affinity, scheduling.priority_class_name)


def store_placement(rollout: SGLangRollout) -> Object:
    """Return the fields of the weight store's pod that say where it may run. A pod with a GPU needs a node like those of engines."""
    store, engines = rollout.spec.weights.store or Store(), rollout.spec.scheduling
    placement = store.scheduling
    fields = _placement(placement, placement.affinity, placement.priority_class_name)
    if store.gpu is None:
        return fields
    node_affinity = {key: value for key, value in (engines.affinity or {}).items() if key == "nodeAffinity"}
    return {**_placement(engines, node_affinity, None), **fields}


def _placement(scheduling: Placement, affinity: Any, priority: str | None) -> Object:
    """Return the scheduling fields that engine pods, router pod and weight store share, without empty fields."""
    fields = {
        "nodeSelector": scheduling.node_selector,
        "tolerations": [toleration.model_dump(mode="json", by_alias=True, exclude_none=True) for toleration in scheduling.tolerations],
        "affinity": affinity,
        "priorityClassName": priority,
    }
    return {field: value for field, value in fields.items() if value}


def pod_labels(rollout: SGLangRollout, engine: int) -> dict[str, str]:
    """Return the label by which a scheduler finds the PodGroup of an engine's pods."""
    return {names.LABEL_POD_GROUP: _group_of(rollout, engine)} if rollout.spec.scheduling.gang else {}


def queue_labels(rollout: SGLangRollout) -> dict[str, str]:
    """Return the label of a StatefulSet by which Kueue queues all of its pods together."""
    queue = rollout.spec.scheduling.queue_name
    return {names.LABEL_QUEUE: queue} if queue else {}


def pod_groups(rollout: SGLangRollout, members: int | None = None) -> list[Object]:
    """Return the PodGroups of ``scheduling.gang``.

    Args:
        rollout: The rollout.
        members: Present number of pods in the group of the base. None: the number that the spec asks for.
    """
    gang, pods = rollout.spec.scheduling.gang, rollout.spec.engine.pods
    if gang is None:
        return []
    version, kind = POD_GROUPS.api_version, POD_GROUPS.kind
    base = names.base_group(rollout.name)
    groups = []
    for name in dict.fromkeys(_group_of(rollout, engine) for engine in range(rollout.spec.engines)):
        engine = None if name == base else name
        group = child(rollout, version, kind, name, names.COMPONENT_ENGINE, engine=engine)
        base_size = rollout.spec.base * pods if members is None else members
        size = pods if engine else base_size
        group["spec"] = {"minMember": size, "scheduleTimeoutSeconds": gang.timeout_seconds}
        groups.append(group)
    return groups


def _group_of(rollout: SGLangRollout, engine: int) -> str:
    """Return the name of the PodGroup that an engine's pods belong to."""
    gang = rollout.spec.scheduling.gang
    if gang and gang.scope is GangScope.BASE and engine < rollout.spec.base:
        return names.base_group(rollout.name)
    return names.engine_name(rollout.name, engine)


def keep_off(pod_spec: Object, avoided: Sequence[str]) -> None:
    """Exclude the nodes ``avoided`` in the affinity of a pod."""
    if not avoided:
        return
    # By name, because the label kubernetes.io/hostname may differ from it. A requirement on a name takes one value.
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in avoided]
    affinity = pod_spec.get("affinity") or {}
    nodes = affinity.get("nodeAffinity") or {}
    # One of the terms must hold, so each gets the requirement. An empty term matches no node and stays empty.
    terms = (nodes.get(_REQUIRED) or {}).get("nodeSelectorTerms") or [{"matchFields": []}]
    kept = [{**term, "matchFields": [*(term.get("matchFields") or []), *fields]} if term else term for term in terms]
    pod_spec["affinity"] = {**affinity, "nodeAffinity": {**nodes, _REQUIRED: {"nodeSelectorTerms": kept}}}


def keep_near(pod_spec: Object, rollout: SGLangRollout, engine: int) -> None:
    """Restore the terms for the topology and the trainer's node, because the user's overlay replaces whole lists of an affinity."""
    affinity = _add_affinity_terms(pod_spec.get("affinity"), _affinity_terms(rollout, engine))
    if affinity:
        pod_spec["affinity"] = affinity


def _affinity_terms(rollout: SGLangRollout, engine: int) -> list[Object]:
    """Return the terms for the topology and the trainer's node.

    The first pod of an engine may run anywhere in the topology, because its term matches the pod itself. For a trainer it waits.
    """
    scheduling, sharing = rollout.spec.scheduling, rollout.spec.sharing
    near = []
    if scheduling.topology_key is not None:
        name = names.engine_name(rollout.name, engine)
        near.append((names.selector(rollout.name, names.COMPONENT_ENGINE, name), scheduling.topology_key))
    if sharing is not None and sharing.trainer_labels:
        near.append((sharing.trainer_labels, _NODE))
    return [{"labelSelector": {"matchLabels": labels}, "topologyKey": key} for labels, key in near]


def _add_affinity_terms(affinity: Any, terms: Sequence[Object]) -> Any:
    """Return an affinity with further required terms of pod affinity. A value of another shape is left to the API server."""
    if not isinstance(affinity, dict | None):
        return affinity
    near = (affinity or {}).get("podAffinity") or {}
    present = near.get(_REQUIRED) or [] if isinstance(near, dict) else None
    if not isinstance(present, list):
        return affinity
    missing = [term for term in terms if term not in present]
    return {**(affinity or {}), "podAffinity": {**near, _REQUIRED: [*present, *missing]}} if missing else affinity
