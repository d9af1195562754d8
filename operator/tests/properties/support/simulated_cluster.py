"""A cluster held in dictionaries, with the parts of API server, controllers and coordinator that carry out plans."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field, replace
from typing import Any

from sglang_rollout.controller.decide.drift import Ownership, read_ownership
from sglang_rollout.controller.decide.plan import Action, Delete, Plan, make_plan
from sglang_rollout.controller.decide.view import FleetView, build_fleet_view
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.common import Settings
from sglang_rollout.wire.record import EngineRow, Record
from sglang_rollout.wire.states import BASE, EngineState
from tests.support.allowed import ANYTHING

SETTINGS = Settings(coordinator_image="example.org/coordinator:1", router_image="example.org/router:1")
Object = dict[str, Any]


@dataclass
class Cluster:
    """Objects by kind and name, and pods by name."""

    cr: Object
    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    pods: dict[str, Object] = field(default_factory=dict)
    ownership: Ownership = field(default_factory=dict)
    """Fields that the operator owns, by UID, as it remembers them after an apply."""
    serial: Any = field(default_factory=lambda: itertools.count(1))

    def observe(self) -> FleetView:
        return build_fleet_view(copy.deepcopy(self.cr), copy.deepcopy(list(self.objects.values())), copy.deepcopy(list(self.pods.values())))

    def plan(self, settings: Settings = SETTINGS) -> Plan:
        return make_plan(replace(self.observe(), ownership=self.ownership), settings, allowed=ANYTHING, new_key="t0ken")

    def execute(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            if isinstance(action, Delete):
                self._delete(action)
            else:
                self._apply(action.object)

    def settle(self) -> None:
        """Do the work of controllers, kubelet and coordinator between two passes of the operator."""
        self._statefulsets()
        self._kubelet()
        self._coordinator()

    def run(self, settings: Settings = SETTINGS, rounds: int = 30) -> None:
        """Alternate operator and cluster until the plan is empty before and after the cluster's turn."""
        for _ in range(rounds):
            made = self.plan(settings)
            self.execute(made.actions)
            self.settle()
            if not made.actions and self.plan(settings).actions == ():
                return
        raise AssertionError(f"not settled after {rounds} rounds; still planned: {self.plan(settings).actions}")

    def converge(self, settings: Settings = SETTINGS) -> None:
        """Run, and check that the operator waits for nothing."""
        self.run(settings)
        assert self.plan(settings).requeue_after is None

    def serving(self) -> set[str]:
        return {engine.name for engine in self.observe().existing if engine.is_serving}

    def take_fields(self, kind: str, name: str) -> Object:
        """Take all fields of an object from the operator, and return the object, so that a test can change it."""
        child = self.objects[kind, name]
        child["metadata"]["managedFields"] = []
        return child

    def edit_spec(self, spec: Object) -> None:
        if spec != self.cr["spec"]:
            self.cr["spec"] = copy.deepcopy(spec)
            self.cr["metadata"]["generation"] += 1

    def _apply(self, obj: Object) -> None:
        key = (obj["kind"], obj["metadata"]["name"])
        live = self.objects.get(key)
        metadata: Object = {"uid": f"uid-{next(self.serial)}", "generation": 0} if live is None else live["metadata"]
        made = _stored(obj)
        spec_changed = live is None or live.get("spec") != made.get("spec")
        made["metadata"] |= {"uid": metadata["uid"], "generation": metadata["generation"] + spec_changed}
        # The API server adds default fields, and keeps the fields of other owners.
        made["status"] = (live or {}).get("status", {})
        if obj["kind"] == "ConfigMap" and "data" not in obj and live and "data" in live:
            made["data"] = live["data"]
        made["metadata"]["managedFields"] = [{"manager": names.FIELD_MANAGER, "operation": "Apply", "fieldsV1": {"f:all": {}}}]
        made["metadata"]["resourceVersion"] = metadata.get("resourceVersion", "")
        if made != live:
            made["metadata"]["resourceVersion"] = str(next(self.serial))
        self.objects[key] = made
        self.ownership[made["metadata"]["uid"]] = read_ownership(made)

    def _delete(self, action: Delete) -> None:
        if action.kind == "Pod":
            assert self.pods[action.name]["metadata"]["uid"] == action.uid
            del self.pods[action.name]
            return
        assert self.objects[action.kind, action.name]["metadata"]["uid"] == action.uid
        del self.objects[action.kind, action.name]
        if action.kind == "StatefulSet":
            for name in [name for name in self.pods if name.rpartition("-")[0] == action.name]:
                del self.pods[name]

    def _statefulsets(self) -> None:
        for (kind, name), child in self.objects.items():
            if kind in {"StatefulSet", "Deployment"}:
                child["status"] = {"observedGeneration": child["metadata"]["generation"], "readyReplicas": 1}
            if kind == "StatefulSet":
                wanted = [names.engine_pod(name, index) for index in range(child["spec"].get("replicas", 1))]
                for pod in wanted:
                    self._make_pod(pod, child)
                # Pods of an earlier, larger StatefulSet are adopted and deleted.
                for pod in [pod for pod in self.pods if pod.rpartition("-")[0] == name and pod not in wanted]:
                    del self.pods[pod]

    def _make_pod(self, name: str, statefulset: Object) -> None:
        if name in self.pods:
            return
        template = statefulset["spec"]["template"]
        metadata = {"name": name, "uid": f"uid-{next(self.serial)}", "labels": dict(template["metadata"]["labels"])}
        self.pods[name] = {"kind": "Pod", "metadata": metadata, "spec": copy.deepcopy(template["spec"]), "status": {}}

    def _kubelet(self) -> None:
        """Make every pod ready, except pods whose image has the word ``broken``."""
        for pod in self.pods.values():
            image = pod["spec"]["containers"][0]["image"]
            ready = "False" if "broken" in image else "True"
            pod["status"] = {"conditions": [{"type": "Ready", "status": ready}]}

    def _coordinator(self) -> None:
        config_map = self.objects.get(("ConfigMap", names.weights_name(self.cr["metadata"]["name"])))
        if config_map is None:
            return
        rows = [
            EngineRow(name=name.removesuffix("-0"), state=EngineState.CLEAN, version=BASE, boot_id="b", gate_open=True)
            for name, pod in sorted(self.pods.items())
            if name.endswith("-0") and pod["status"]["conditions"][0]["status"] == "True"
        ]
        record = Record(term=1, epoch=1, committed=BASE, engines=rows)
        config_map["data"] = {names.WEIGHTS_KEY: record.model_dump_json()}


def _stored(obj: Any) -> Any:
    """Return the object as the API server stores it: an unknown field in lower case, and without empty node selectors."""
    if isinstance(obj, dict):
        return {
            key: value.lower() if key == "rewritten" else _stored(value)
            for key, value in obj.items()
            if not (key == "nodeSelector" and value == {})
        }
    return [_stored(item) for item in obj] if isinstance(obj, list) else obj


def rollout(name: str = "demo", **spec: Any) -> Object:
    """Return a small CPU rollout. Fields of ``spec`` replace its own."""
    base = {
        "replicas": 2,
        "model": {"path": "/models/tiny"},
        "engine": {"image": "example.org/engine:1", "gpuResource": ""},
    }
    return {
        "apiVersion": "rollout.sglang.io/v1alpha1",
        "kind": "SGLangRollout",
        "metadata": {"name": name, "namespace": "default", "uid": "uid-cr", "generation": 1},
        "spec": {**base, **spec},
    }
