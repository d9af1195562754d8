"""Join everything observed of one rollout, once, into the view that every decision reads.

``observe`` builds a :class:`FleetView`; plan, status, conditions, node avoidance and elastic read it. Nothing here decides. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any

import pydantic

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.contest import Restores
from sglang_rollout.controller.decide.drift import Ownership
from sglang_rollout.controller.decide.overlay_mounts import find_forbidden_mount
from sglang_rollout.controller.decide.pod_shapes import find_misfit
from sglang_rollout.controller.decide.pods import Pod, count_designed_pods
from sglang_rollout.controller.decide.prerequisites import Cluster
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.hashing import revision, revisions
from sglang_rollout.controller.render.tls import find_secret, is_encrypted
from sglang_rollout.kube.resources import Object
from sglang_rollout.wire.reasons import end_sentence
from sglang_rollout.wire.record import EngineRow, Record
from sglang_rollout.wire.states import EngineState, FleetState

Key = tuple[str, str]
"""Kind and name of a child."""


@dataclass(frozen=True, kw_only=True)
class EngineView:
    """One engine that is wanted or still exists: its StatefulSet, pods, and rows of record and status."""

    index: int
    name: str
    """Name of the engine and of its StatefulSet."""
    is_wanted: bool
    """False if the engine is being removed."""
    is_surplus: bool
    """True if the engine is wanted in addition to ``elastic.base``."""
    revision: str
    """Revision that the current spec asks for."""
    statefulset: Object | None
    """The live StatefulSet."""
    pods: tuple[Pod, ...]
    """Live pods, by rank."""
    row: EngineRow | None
    """The coordinator's record of the engine."""
    previous: Mapping[str, Any]
    """Row of the engine in the last status; empty if there is none."""
    creation_error: str
    """Why the engine's pods cannot be created, quoting the StatefulSet controller; empty if no such error is known."""
    holds_committed: bool
    """True if the coordinator has recorded that the engine holds all of the committed version."""
    is_serving: bool
    """True if the pods are ready, the router runs and the coordinator has recorded an open gate.

    The record alone does not suffice, because it describes the engine at the coordinator's last look. Without a running
    router, no engine serves.
    """
    is_paused_by_spec: bool
    """True if ``spec.state: Paused`` is the only reason why the engine does not serve."""

    @cached_property
    def size(self) -> int:
        """Number of pods that the engine was made for. The current spec may want another number."""
        return count_designed_pods(self.statefulset) if self.statefulset else 1

    @cached_property
    def head_pod(self) -> Pod | None:
        """The pod that answers requests."""
        head = names.engine_pod(self.name)
        return next((pod for pod in self.pods if pod.name == head), None)

    @cached_property
    def is_ready(self) -> bool:
        """True if all pods exist and are ready."""
        return _is_ready(self.pods, self.size)

    @cached_property
    def has_nodes(self) -> bool:
        """True if all pods exist and have a node."""
        return len(self.pods) == self.size and all(pod.node for pod in self.pods)

    @cached_property
    def lacks_pods(self) -> bool:
        """True if pods are missing although the StatefulSet controller has reported how many pods it created."""
        created = _status(self.statefulset).get("replicas")
        return created is not None and max(created, len(self.pods)) < self.size

    @cached_property
    def is_observed(self) -> bool:
        """True if the StatefulSet controller has seen the newest template. Before that, it recreates pods from the old template."""
        return _is_observed(self.statefulset)

    @cached_property
    def is_up_to_date(self) -> bool:
        """True if the engine has pods, and none is outdated."""
        return bool(self.pods) and not any(self.is_outdated(pod) for pod in self.pods)

    def is_outdated(self, pod: Pod) -> bool:
        """Return True if a pod is from another revision, or older than a ``kubectl rollout restart`` of the StatefulSet."""
        return pod.revision != self.revision or pod.is_older_than_restart(self.statefulset)


@dataclass(frozen=True)
class FleetView:
    """Everything that a decision about one rollout may read."""

    cr: Object
    """The custom resource as the API server returned it."""
    rollout: SGLangRollout | None
    """The parsed custom resource; None if it is invalid."""
    invalid: str = ""
    """Why the custom resource is invalid, as a sentence."""
    children: Mapping[Key, Object] = field(default_factory=dict)
    """Live objects with the rollout's label, by kind and name."""
    pods: Mapping[str, Pod] = field(default_factory=dict)
    """Live pods with the rollout's label, by name."""
    record: Record | None = None
    """The coordinator's record; None before the coordinator has written one."""
    record_problem: str = ""
    """Why the record cannot be read, as a sentence."""
    cluster: Cluster = field(default_factory=Cluster)
    """Facts about the cluster beyond the rollout's own objects."""
    restores: Mapping[Key, Restores] = field(default_factory=dict)
    """How often each child was restored after changes by other clients."""
    ownership: Ownership | None = None
    """What the operator owned after its last applies. None: unknown, so changes by other clients are not seen."""

    @property
    def name(self) -> str:
        """Name of the rollout."""
        return str(self.cr["metadata"]["name"])

    @property
    def uid(self) -> str:
        """UID of the custom resource."""
        return str(self.cr["metadata"].get("uid", ""))

    @property
    def is_being_deleted(self) -> bool:
        """True if the custom resource is being deleted. Owner references remove its children."""
        return bool(self.cr["metadata"].get("deletionTimestamp"))

    @property
    def previous(self) -> Mapping[str, Any]:
        """The last status that was written."""
        return _status(self.cr)

    @cached_property
    def avoided_nodes(self) -> tuple[str, ...]:
        """Nodes that engines must not use, sorted.

        Read from the status, because a pod does not show why it was moved. So a decision takes effect only after the status
        contains it.
        """
        return tuple(sorted(str(row["node"]) for row in self.previous.get("avoidedNodes") or []))

    @cached_property
    def engines(self) -> tuple[EngineView, ...]:
        """Wanted engines by index, then those being removed by index; none if the custom resource is invalid."""
        return tuple(_join_engines(self, self.rollout)) if self.rollout else ()

    @cached_property
    def wanted(self) -> tuple[EngineView, ...]:
        """Wanted engines; the position of each is its index."""
        return tuple(engine for engine in self.engines if engine.is_wanted)

    @cached_property
    def existing(self) -> tuple[EngineView, ...]:
        """Engines whose StatefulSet exists, wanted or not."""
        return tuple(engine for engine in self.engines if engine.statefulset)

    @cached_property
    def base(self) -> tuple[EngineView, ...]:
        """Wanted engines that are not surplus."""
        return tuple(engine for engine in self.wanted if not engine.is_surplus)

    @cached_property
    def base_has_nodes(self) -> bool:
        """True if all pods of the base have a node."""
        return all(engine.has_nodes for engine in self.base)

    @cached_property
    def is_router_ready(self) -> bool:
        """True if the router runs in its current form."""
        return bool(_status(self._router).get("readyReplicas")) and _is_observed(self._router)

    @cached_property
    def is_encrypted(self) -> bool:
        """True if the fleet's URL is HTTPS. A spec with a certificate that cannot be used has no effect on the router yet."""
        if self._router is not None:
            return find_secret(self._router) is not None
        return self.rollout is not None and is_encrypted(self.rollout)

    @cached_property
    def serves_wanted_certificate(self) -> bool:
        """True if the router was made with the Secret of ``security.tls``."""
        tls = self.rollout.spec.security.tls if self.rollout else None
        return tls is not None and self._router is not None and find_secret(self._router) == tls.secret_name

    @cached_property
    def router_creation_error(self) -> str:
        """The API server's message that refuses the router's pod; empty if there is none."""
        conditions = _status(self._router).get("conditions") or []
        failed = [condition for condition in conditions if (condition.get("type"), condition.get("status")) == ("ReplicaFailure", "True")]
        return str(failed[0].get("message") or "") if failed else ""

    @property
    def is_router_paused(self) -> bool:
        """True if Kubernetes does not bring changes of the router's Deployment to its pods (``kubectl rollout pause``)."""
        return self._router is not None and bool(self._router["spec"].get("paused"))

    @cached_property
    def router_pods(self) -> tuple[Pod, ...]:
        """Pods of the router, by name."""
        return tuple(pod for _, pod in sorted(self.pods.items()) if pod.component == names.COMPONENT_ROUTER)

    @property
    def store(self) -> Object | None:
        """The live StatefulSet of the weight store."""
        return self.child("StatefulSet", names.store_name(self.name))

    @cached_property
    def is_store_observed(self) -> bool:
        """True if the StatefulSet controller has seen the newest template of the weight store."""
        return _is_observed(self.store)

    @cached_property
    def store_pod(self) -> Pod | None:
        """The pod of the weight store."""
        return next((pod for pod in self.pods.values() if pod.component == names.COMPONENT_STORE), None)

    @cached_property
    def gate_ports(self) -> dict[str, int]:
        """Ports of the existing gates, by engine. During a rolling update to other ports most gates still have the old one."""
        heads = ((engine.name, engine.head_pod) for engine in self.engines)
        return {name: head.gate_port for name, head in heads if head is not None and head.gate_port is not None}

    @cached_property
    def process_group_members(self) -> frozenset[str]:
        """Engines that are members of an open process group."""
        record = self.record
        return frozenset(row.name for group in record.joined for row in record.members(group)) if record else frozenset()

    def child(self, kind: str, name: str) -> Object | None:
        """Return a live child."""
        return self.children.get((kind, name))

    @property
    def _router(self) -> Object | None:
        return self.child("Deployment", names.router_name(self.name))


def build_fleet_view(cr: Object, children: Iterable[Object], pods: Iterable[Object]) -> FleetView:
    """Build the view of one rollout from objects of the API server.

    Never raises: ``invalid`` and ``record_problem`` of the view describe what could not be read.
    """
    by_key = {(child["kind"], child["metadata"]["name"]): child for child in children}
    rollout, invalid = _parse_rollout(cr)
    record, problem = _parse_record(by_key.get(("ConfigMap", names.weights_name(cr["metadata"]["name"]))))
    return FleetView(
        cr=cr,
        rollout=rollout,
        invalid=invalid,
        children=by_key,
        pods={pod["metadata"]["name"]: Pod(pod) for pod in pods},
        record=record,
        record_problem=problem,
    )


def _join_engines(fleet: FleetView, rollout: SGLangRollout) -> Iterator[EngineView]:
    """Join everything about each engine in one pass over children, pods, record and status."""
    wanted, leaving = revisions(rollout), revision(rollout)
    live = {name: child for (kind, name), child in fleet.children.items() if kind == "StatefulSet"}
    indices = {name: index for index, name in enumerate(wanted)}
    for name in live.keys() - wanted.keys():
        index = names.engine_index(rollout.name, name)
        if index is not None:
            indices[name] = index
    pods = _pods_by_engine(fleet.pods.values(), indices)
    rows = {row.name: row for row in fleet.record.engines} if fleet.record else {}
    previous = {row.get("name"): row for row in fleet.previous.get("engines") or []}
    is_paused = fleet.record is not None and fleet.record.state is FleetState.PAUSED
    for name, index in sorted(indices.items(), key=itemgetter(1)):
        row, statefulset, members = rows.get(name), live.get(name), pods.get(name, ())
        is_up = fleet.is_router_ready and _is_ready(members, count_designed_pods(statefulset) if statefulset else 1)
        holds = holds_committed(fleet.record, row)
        yield EngineView(
            index=index,
            name=name,
            is_wanted=name in wanted,
            is_surplus=name in wanted and index >= rollout.spec.base,
            revision=wanted.get(name, leaving),
            statefulset=statefulset,
            pods=members,
            row=row,
            previous=previous.get(name, {}),
            creation_error=fleet.cluster.creation_errors.get(name, ""),
            holds_committed=holds,
            is_serving=is_up and row is not None and row.gate_open,
            is_paused_by_spec=is_up and is_paused and holds,
        )


def _pods_by_engine(pods: Iterable[Pod], engines: Mapping[str, int]) -> dict[str, tuple[Pod, ...]]:
    """Return the pods of each engine, by rank."""
    ranked: dict[str, list[tuple[int, Pod]]] = {}
    for pod in pods:
        engine, _, rank = pod.name.rpartition("-")
        if engine in engines and rank.isdecimal():
            ranked.setdefault(engine, []).append((int(rank), pod))
    return {engine: tuple(pod for _, pod in sorted(found, key=itemgetter(0))) for engine, found in ranked.items()}


def _is_ready(pods: tuple[Pod, ...], size: int) -> bool:
    return len(pods) == size and all(pod.is_ready for pod in pods)


def holds_committed(record: Record | None, row: EngineRow | None) -> bool:
    """Return True if the coordinator has recorded that an engine holds all of the committed version."""
    if record is None or row is None or row.state is not EngineState.CLEAN or row.version is None:
        return False
    return (row.version.run, row.version.step) == (record.committed.run, record.committed.step)


def _status(live: Object | None) -> Object:
    return (live or {}).get("status") or {}


def _is_observed(live: Object | None) -> bool:
    return bool(_status(live).get("observedGeneration") == (live or {}).get("metadata", {}).get("generation"))


def _parse_rollout(cr: Object) -> tuple[SGLangRollout | None, str]:
    """Parse the spec without the status: an unreadable status is replaced, and must not block the spec."""
    try:
        rollout = SGLangRollout.model_validate({key: value for key, value in cr.items() if key != "status"})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        problem = end_sentence(f"{where}: {first['msg']}")
        return None, f"{problem} The object was stored under another version of the API: apply it again."
    problem = find_misfit(rollout) or find_forbidden_mount(rollout)
    return (None, problem) if problem else (rollout, "")


def _parse_record(config_map: Object | None) -> tuple[Record | None, str]:
    text = ((config_map or {}).get("data") or {}).get(names.WEIGHTS_KEY)
    if not text:
        return None, ""
    try:
        return Record.model_validate_json(text), ""
    except pydantic.ValidationError as error:
        return None, (
            f"The coordinator's record ({names.WEIGHTS_KEY} in its ConfigMap) cannot be read: {error.errors()[0]['msg']}."
            " The coordinator rewrites it; do not edit it by hand."
        )
