"""Where and when pods may run: ``spec.scheduling`` and ``router.scheduling`` in the words of pods, of Kueue and of coscheduling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_rollout.api.scheduling_spec import GangScope, Placement, Spread
from sglang_rollout.api.sharing_spec import ENGINE_INDEX
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.common import Object, child

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_NODE = "kubernetes.io/hostname"
CLAIM = "shared-gpus"
"""What the pod calls the claim that it shares with the trainer."""
_UNSATISFIABLE = {Spread.PREFERRED: "ScheduleAnyway", Spread.REQUIRED: "DoNotSchedule"}


def pod_placement(rollout: SGLangRollout, engine: int) -> Object:
    """Return the fields of the spec of an engine's pods that say so; none where nothing is said."""
    wanted, elastic = rollout.spec.scheduling, rollout.spec.elastic
    beyond = elastic.priority_class_name if elastic and engine >= elastic.base else None
    made = _placed(wanted, _demanding(wanted.affinity, _demands(rollout, engine)), beyond or wanted.priority_class_name)
    if wanted.gang:
        made["schedulerName"] = wanted.gang.scheduler
    if wanted.spread_engines is not Spread.OFF:
        made["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": _NODE,
                "whenUnsatisfiable": _UNSATISFIABLE[wanted.spread_engines],
                "labelSelector": {"matchLabels": names.selector(rollout.name, names.COMPONENT_ENGINE)},
            }
        ]
    sharing = rollout.spec.sharing
    if sharing is not None and sharing.resource_claim_name:
        claim = sharing.resource_claim_name.replace(ENGINE_INDEX, str(engine))
        made["resourceClaims"] = [{"name": CLAIM, "resourceClaimName": claim}]
    return made


def router_placement(rollout: SGLangRollout) -> Object:
    """Return the fields of the router pod's spec that say where it may run."""
    wanted = rollout.spec.router.scheduling
    return _placed(wanted, wanted.affinity, wanted.priority_class_name)


def _placed(wanted: Placement, affinity: Any, priority: str | None) -> Object:
    """Return the fields that engine pods and the router pod share, without those that are empty."""
    made = {
        "nodeSelector": wanted.node_selector,
        "tolerations": [toleration.model_dump(mode="json", by_alias=True, exclude_none=True) for toleration in wanted.tolerations],
        "affinity": affinity,
        "priorityClassName": priority,
    }
    return {field: value for field, value in made.items() if value}


def pod_labels(rollout: SGLangRollout, engine: int) -> dict[str, str]:
    """Return the labels by which a scheduler knows the pods of an engine, or of the base, as a group."""
    return {names.LABEL_POD_GROUP: _group_of(rollout, engine)} if rollout.spec.scheduling.gang else {}


def queue_labels(rollout: SGLangRollout) -> dict[str, str]:
    """Return the labels of a StatefulSet by which Kueue takes its pods into a queue, all of them at once."""
    queue = rollout.spec.scheduling.queue_name
    return {names.LABEL_QUEUE: queue} if queue else {}


def pod_groups(rollout: SGLangRollout, members: int | None = None) -> list[Object]:
    """Return the PodGroups of pods that are scheduled together or not at all.

    ``members``: how many pods the group of the base has now, if not all that it is to have.
    """
    gang, pods = rollout.spec.scheduling.gang, rollout.spec.engine.pods
    if gang is None:
        return []
    version, kind = names.POD_GROUP.api_version, names.POD_GROUP.kind
    base = names.base_group(rollout.name)
    made = []
    for name in dict.fromkeys(_group_of(rollout, engine) for engine in range(rollout.spec.engines)):
        engine = None if name == base else name
        group = child(rollout, api_version=version, kind=kind, name=name, component=names.COMPONENT_ENGINE, engine=engine)
        whole = rollout.spec.base * pods if members is None else members
        size = pods if engine else whole
        group["spec"] = {"minMember": size, "scheduleTimeoutSeconds": gang.timeout_seconds}
        made.append(group)
    return made


def _group_of(rollout: SGLangRollout, engine: int) -> str:
    """The name of the PodGroup that an engine's pods belong to."""
    gang = rollout.spec.scheduling.gang
    if gang and gang.scope is GangScope.BASE and engine < rollout.spec.base:
        return names.base_group(rollout.name)
    return names.engine_name(rollout.name, engine)


def keep_off(pod_spec: Object, avoided: Sequence[str]) -> None:
    """Add to the affinity of a pod that it must not go to the nodes ``avoided``."""
    if not avoided:
        return
    # By name, not by the label kubernetes.io/hostname, which may be another one. A requirement on a name takes one value.
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in avoided]
    affinity = pod_spec.get("affinity") or {}
    nodes = affinity.get("nodeAffinity") or {}
    # One term must hold, all of it, so each gets the demand; an empty term, which no node fulfils, stays one.
    terms = (nodes.get(_REQUIRED) or {}).get("nodeSelectorTerms") or [{"matchFields": []}]
    kept = [{**term, "matchFields": [*(term.get("matchFields") or []), *fields]} if term else term for term in terms]
    pod_spec["affinity"] = {**affinity, "nodeAffinity": {**nodes, _REQUIRED: {"nodeSelectorTerms": kept}}}


def keep_near(pod_spec: Object, rollout: SGLangRollout, engine: int) -> None:
    """Put the demands for the topology and the trainer's node back into the affinity of a pod: the user's overlay replaces whole lists."""
    affinity = _demanding(pod_spec.get("affinity"), _demands(rollout, engine))
    if affinity:
        pod_spec["affinity"] = affinity


def _demands(rollout: SGLangRollout, engine: int) -> list[Object]:
    """The topology and the trainer's node. The scheduler lets the first pod of an engine go anywhere in the topology, because that
    demand is about itself; for the trainer it waits."""
    wanted, sharing = rollout.spec.scheduling, rollout.spec.sharing
    near = []
    if wanted.topology_key is not None:
        name = names.engine_name(rollout.name, engine)
        near.append((names.selector(rollout.name, names.COMPONENT_ENGINE, name), wanted.topology_key))
    if sharing is not None and sharing.trainer_labels:
        near.append((sharing.trainer_labels, _NODE))
    return [{"labelSelector": {"matchLabels": labels}, "topologyKey": key} for labels, key in near]


def _demanding(affinity: Any, demands: Sequence[Object]) -> Any:
    """An affinity with further demands to be near other pods. What is none is left to the API server, which refuses it."""
    if not isinstance(affinity, dict | None):
        return affinity
    near = (affinity or {}).get("podAffinity") or {}
    terms = near.get(_REQUIRED) or [] if isinstance(near, dict) else None
    if not isinstance(terms, list):
        return affinity
    missing = [demand for demand in demands if demand not in terms]
    return {**(affinity or {}), "podAffinity": {**near, _REQUIRED: [*terms, *missing]}} if missing else affinity
