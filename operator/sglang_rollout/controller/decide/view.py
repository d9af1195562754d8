"""What was observed of one SGLangRollout, as plain data: the input of every decision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any

import pydantic

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide import pods
from sglang_rollout.controller.decide.pod_shapes import misfit
from sglang_rollout.controller.decide.prerequisites import Cluster
from sglang_rollout.controller.decide.sentences import sentence
from sglang_rollout.controller.render import names
from sglang_rollout.wire.record import EngineRow, Record

Object = dict[str, Any]
Key = tuple[str, str]


@dataclass(frozen=True)
class World:
    """Everything that a decision may look at."""

    cr: Object
    """The custom resource as it is in the API server."""
    rollout: SGLangRollout | None
    """The same, parsed; None if it cannot be read."""
    invalid: str = ""
    """Why it cannot be read, as a sentence."""
    children: Mapping[Key, Object] = field(default_factory=dict)
    """Live objects with the rollout's label, by (kind, name)."""
    pods: Mapping[str, Object] = field(default_factory=dict)
    """Live pods with the rollout's label, by name."""
    record: Record | None = None
    """What the coordinator has recorded; None before it has."""
    record_problem: str = ""
    """Why the coordinator's record cannot be read, as a sentence."""
    cluster: Cluster = field(default_factory=Cluster)
    """What the cluster has for it beyond plain Kubernetes."""

    @property
    def uid(self) -> str:
        """Identity of the custom resource."""
        return str(self.cr.get("metadata", {}).get("uid", ""))

    @property
    def deleting(self) -> bool:
        """Whether the custom resource is being deleted: its children go by their owner references."""
        return bool(self.cr.get("metadata", {}).get("deletionTimestamp"))

    @cached_property
    def avoided(self) -> tuple[str, ...]:
        """Nodes that engines are kept off, in order. Of the status nothing but this memory is read back: pods do not tell why they
        were moved. What was decided is thus acted on only after it was written down."""
        return tuple(sorted(str(row["node"]) for row in (self.cr.get("status") or {}).get("avoidedNodes") or []))

    def child(self, kind: str, name: str) -> Object | None:
        """Return a live child."""
        return self.children.get((kind, name))

    def engines(self) -> dict[str, Object]:
        """Return the live StatefulSets of engines by name, in the order of their indices."""
        name = self.cr["metadata"]["name"]
        found = {
            child_name: child
            for (kind, child_name), child in self.children.items()
            if kind == "StatefulSet" and names.engine_index(name, child_name) is not None
        }
        return dict(sorted(found.items(), key=lambda item: names.engine_index(name, item[0]) or 0))

    def pod_of(self, engine: str) -> Object | None:
        """Return the pod of an engine that serves."""
        return self.pods.get(names.engine_pod(engine))

    def gates(self) -> dict[str, int]:
        """Return the ports of the gates that are there, by engine. In a rolling update to other ports most are still where they were."""
        found = {engine: pods.gate_port_of(self.pod_of(engine)) for engine in self._by_engine}
        return {engine: port for engine, port in found.items() if port is not None}

    def pods_of(self, engine: str) -> list[Object]:
        """Return the pods of an engine that are there, by their rank."""
        return self._by_engine.get(engine, [])

    def whole(self, engine: str) -> bool:
        """Whether all pods of an engine are ready."""
        found = self.pods_of(engine)
        return len(found) == self.size_of(engine) and all(pods.is_ready(pod) for pod in found)

    def lacks_pods(self, engine: str) -> bool:
        """Whether pods of an engine are not there, and its controller has looked: it counts those that it has made."""
        live = self.child("StatefulSet", engine) or {}
        counted = (live.get("status") or {}).get("replicas")
        return counted is not None and max(counted, len(self.pods_of(engine))) < self.size_of(engine)

    def size_of(self, engine: str) -> int:
        """Return how many pods an engine has, which may be another number than is wanted now."""
        live = self.child("StatefulSet", engine)
        return pods.made_for(live) if live else 1

    @cached_property
    def _by_engine(self) -> dict[str, list[Object]]:
        found: dict[str, list[tuple[int, Object]]] = {}
        for name, pod in self.pods.items():
            engine, _, index = name.rpartition("-")
            if index.isdecimal() and names.engine_index(self.cr["metadata"]["name"], engine) is not None:
                found.setdefault(engine, []).append((int(index), pod))
        return {engine: [pod for _, pod in sorted(ranked, key=itemgetter(0))] for engine, ranked in found.items()}

    def router_pods(self) -> list[Object]:
        """Return the pods of the router."""
        return [
            pod
            for _, pod in sorted(self.pods.items())
            if (pod["metadata"].get("labels") or {}).get(names.LABEL_COMPONENT) == names.COMPONENT_ROUTER
        ]

    def row(self, engine: str) -> EngineRow | None:
        """Return what the coordinator has recorded about an engine."""
        rows = self.record.engines if self.record else []
        return next((row for row in rows if row.name == engine), None)


def observe_world(cr: Object, children: Iterable[Object], pods: Iterable[Object]) -> World:
    """Put together what was read from the API server. Never raises: what cannot be read is said in the result."""
    by_key = {(child["kind"], child["metadata"]["name"]): child for child in children}
    rollout, invalid = _parse(cr)
    record, problem = _record(by_key.get(("ConfigMap", names.weights_name(cr["metadata"]["name"]))))
    return World(
        cr=cr,
        rollout=rollout,
        invalid=invalid,
        children=by_key,
        pods={pod["metadata"]["name"]: pod for pod in pods},
        record=record,
        record_problem=problem,
    )


def _parse(cr: Object) -> tuple[SGLangRollout | None, str]:
    """Without the status: that one which we cannot read is written anew, and must not stand in the way of the spec."""
    try:
        rollout = SGLangRollout.model_validate({key: value for key, value in cr.items() if key != "status"})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        said = sentence(f"{where}: {first['msg']}")
        return None, f"{said} The object was stored under another version of the API: apply it again."
    problem = misfit(rollout)
    return (None, problem) if problem else (rollout, "")


def _record(config_map: Object | None) -> tuple[Record | None, str]:
    text = ((config_map or {}).get("data") or {}).get(names.WEIGHTS_KEY)
    if not text:
        return None, ""
    try:
        return Record.model_validate_json(text), ""
    except pydantic.ValidationError as error:
        return None, (
            f"the coordinator's record ({names.WEIGHTS_KEY} of its ConfigMap) cannot be read:"
            f" {error.errors()[0]['msg']}. It is rewritten by the coordinator; it should not be edited by hand."
        )
