"""A node on which an engine fails repeatedly, from the first failure until engines may use the node again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglang_rollout.controller.decide.plan import Apply, Delete
from sglang_rollout.controller.decide.status import build_status
from tests.properties.support.simulated_cluster import Cluster, rollout

Object = dict[str, Any]
POLICY = {"avoidNodes": {"failures": 3, "withinSeconds": 600, "forSeconds": 1200}}


def at(minute: int) -> str:
    return f"2026-11-21T03:{minute:02}:00Z"


@dataclass
class Nodes(Cluster):
    """A cluster whose scheduler takes the first allowed node, with kubelets that restart engines."""

    nodes: list[str] = field(default_factory=lambda: ["a", "b", "c"])
    ends: dict[str, Object] = field(default_factory=dict)
    """Last end of the engine, by UID of its pod. The engine does not come up again there."""

    def _kubelet(self) -> None:
        super()._kubelet()
        for name, pod in sorted(self.pods.items()):
            if "-engine-" not in name:
                continue
            if "nodeName" not in pod["spec"]:
                taken = {other["spec"].get("nodeName") for other in self.pods.values()}
                pod["spec"]["nodeName"] = next(node for node in self.nodes if node not in self._forbidden(pod) | taken)
            ended = self.ends.get(pod["metadata"]["uid"])
            container: Object = {"name": "engine", "started": not ended, "ready": not ended}
            if ended:
                container["lastState"] = {"terminated": ended}
                pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
            pod["status"]["containerStatuses"] = [container]

    def _forbidden(self, pod: Object) -> set[str]:
        required = pod["spec"].get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
        return {name["values"][0] for term in required.get("nodeSelectorTerms", []) for name in term["matchFields"]}

    def fail(self, engine: int, minute: int, rank: int = 0) -> None:
        uid = self.pods[f"demo-engine-{engine}-{rank}"]["metadata"]["uid"]
        self.ends[uid] = {"exitCode": 1, "reason": "Error", "finishedAt": at(minute)}
        self._kubelet()

    def heal(self, engine: int) -> None:
        del self.ends[self.pods[f"demo-engine-{engine}-0"]["metadata"]["uid"]]
        self._kubelet()

    def report(self, minute: int) -> None:
        self.cr["status"] = build_status(self.observe(), at(minute))

    def go_on(self, minute: int) -> list[str]:
        """Let the operator plan until nothing is left to do, and return the deleted pods."""
        deleted = []
        for _ in range(10):
            made = self.plan()
            self.execute(made.actions)
            deleted += [action.name for action in made.actions if isinstance(action, Delete)]
            self.settle()
            before = self.cr.get("status")
            self.report(minute)
            if not made.actions and self.cr["status"] == before:
                return deleted
        raise AssertionError("it does not come to rest")

    def places(self) -> dict[str, tuple[str, str]]:
        return {name: (pod["spec"]["nodeName"], pod["metadata"]["uid"]) for name, pod in sorted(self.pods.items()) if "-engine-" in name}


def fleet(**scheduling: Any) -> Nodes:
    made = Nodes(rollout(replicas=2, scheduling={**POLICY, **scheduling}))
    made.go_on(0)
    assert {name: node for name, (node, _) in made.places().items()} == {"demo-engine-0-0": "a", "demo-engine-1-0": "b"}
    return made


def failed_three_times(**scheduling: Any) -> Nodes:
    made = fleet(**scheduling)
    for minute in (1, 3, 5):
        assert "avoidedNodes" not in made.cr["status"]
        made.fail(1, minute)
        made.report(minute)
    return made


def test_failing_engine_is_moved_once_and_others_stay() -> None:
    made = failed_three_times()
    before = made.places()
    assert made.go_on(6) == ["demo-engine-1-0"]
    after = made.places()
    assert after["demo-engine-1-0"][0] == "c"
    assert after["demo-engine-0-0"] == before["demo-engine-0-0"]
    assert made.serving() == {"demo-engine-0", "demo-engine-1"}
    # Another operator, which knows only what is in the API server, finds nothing left to do.
    assert made.plan().actions == ()


def test_pod_is_deleted_after_its_statefulset_avoids_the_node() -> None:
    made = failed_three_times()
    first = made.plan().actions
    assert {(type(action), action.object["kind"]) for action in first if isinstance(action, Apply)} == {(Apply, "StatefulSet")}
    assert len(first) == 2, "both engines, and no pod yet"
    made.execute(first)
    assert made.plan().actions == (), "the controller of StatefulSets has not looked yet"
    made.settle()
    assert [action.name for action in made.plan().actions if isinstance(action, Delete)] == ["demo-engine-1-0"]


def test_an_engine_of_several_pods_is_moved_as_a_whole() -> None:
    wide = {"image": "example.org/engine:1", "gpuResource": "", "nodes": 2, "parallelism": {"tensor": 2}}
    made = Nodes(rollout(engine=wide, scheduling=POLICY), nodes=["a", "b", "c", "d", "e"])
    made.go_on(0)
    for minute in (1, 3, 5):
        made.fail(1, minute, rank=1)
        made.report(minute)
    assert made.go_on(6) == ["demo-engine-1-0", "demo-engine-1-1"]
    assert {name: node for name, (node, _) in made.places().items() if "engine-1" in name} == {
        "demo-engine-1-0": "c",
        "demo-engine-1-1": "e",
    }


def test_no_engine_is_moved_before_the_status_is_written() -> None:
    made = fleet()
    made.fail(1, 1)
    made.fail(1, 3)
    made.cr["status"]["nodeFailures"] = [
        {
            "node": "b",
            "engine": "demo-engine-1",
            "revision": made.pods["demo-engine-1-0"]["metadata"]["labels"]["rollout.sglang.io/revision"],
        }
        | {"time": at(minute), "reason": "", "message": ""}
        for minute in (1, 2)
    ]
    assert made.plan().actions == ()
    made.report(4)
    assert [row["node"] for row in made.cr["status"]["avoidedNodes"]] == ["b"]
    assert made.plan().actions != ()


def test_recovered_engine_stays_until_it_fails_again() -> None:
    made = failed_three_times()
    made.heal(1)
    assert made.go_on(6) == []
    assert made.places()["demo-engine-1-0"][0] == "b"
    made.fail(1, 9)
    assert made.go_on(9) == ["demo-engine-1-0"]


def test_expired_avoidance_restarts_no_engine() -> None:
    made = failed_three_times()
    made.go_on(6)
    before = made.places()
    assert made.go_on(24) == []
    assert made.cr["status"]["avoidedNodes"][0]["until"] == at(25)
    assert made.go_on(25) == []
    assert "avoidedNodes" not in made.cr["status"]
    assert made.places() == before
    del made.pods["demo-engine-1-0"]
    made.go_on(26)
    assert made.places()["demo-engine-1-0"][0] == "b"


def test_removing_the_field_allows_all_nodes() -> None:
    made = failed_three_times()
    made.go_on(6)
    before = made.places()
    made.edit_spec({**made.cr["spec"], "scheduling": {}})
    assert made.go_on(7) == []
    assert made.places() == before
    assert "affinity" not in made.objects["StatefulSet", "demo-engine-1"]["spec"]["template"]["spec"]


def test_broken_spec_moves_no_engine() -> None:
    made = fleet()
    for minute in (1, 3, 5, 7):
        for engine in (0, 1):
            made.fail(engine, minute)
        assert made.go_on(minute) == []
    assert "avoidedNodes" not in made.cr["status"]
