"""Fleets with a base (``spec.elastic``) in a cluster with limited room and a scheduler for PodGroups."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_rollout.controller.decide.plan import Delete, Plan, make_plan
from sglang_rollout.controller.render import names
from tests.properties.support.simulated_cluster import SETTINGS, Cluster, rollout

Object = dict[str, Any]
LATER = "2026-11-21T03:01:00Z"
MADE = "2026-11-21T03:00:00Z"


@dataclass
class Room(Cluster):
    """Room for so many engine pods. A group starts when all of its pods exist and so many get room as it must have, as coscheduling
    does it: those that have a node already count. A pod without a group goes where there is room."""

    room: int = 100
    now: str = ""
    started: dict[str, str] = field(default_factory=dict)
    """Time when each pod got its node, by UID."""

    def plan(self, settings: Any = SETTINGS) -> Plan:
        return make_plan(self.observe(), settings, self.now, new_key="t0ken")

    def _kubelet(self) -> None:
        groups: dict[str, list[Object]] = defaultdict(list)
        for name, pod in sorted(self.engine_pods().items()):
            pod["metadata"].setdefault("creationTimestamp", self.now or MADE)
            groups[pod["metadata"]["labels"].get(names.LABEL_POD_GROUP, name)].append(pod)
        for group, found in sorted(groups.items()):
            self._schedule(group, found)
        super()._kubelet()
        by_engine: dict[str, list[Object]] = defaultdict(list)
        for name, pod in self.engine_pods().items():
            by_engine[name.rpartition("-")[0]].append(pod)
        for found in by_engine.values():
            up = all("nodeName" in pod["spec"] for pod in found)
            for pod in found:
                started = (
                    {"startTime": self.started.setdefault(pod["metadata"]["uid"], self.now or MADE)} if "nodeName" in pod["spec"] else {}
                )
                pod["status"] = {"conditions": [{"type": "Ready", "status": str(up)}], **started}

    def _schedule(self, group: str, found: list[Object]) -> None:
        waiting = [pod for pod in found if "nodeName" not in pod["spec"]]
        least = self._least(group, found)
        free = max(0, self.room - sum("nodeName" in pod["spec"] for pod in self.engine_pods().values()))
        fitting = waiting[:free]
        if least is not None and len(found) >= least and len(found) - len(waiting) + len(fitting) >= least:
            for pod in fitting:
                pod["spec"]["nodeName"] = "node"

    def _least(self, group: str, found: list[Object]) -> int | None:
        """Return how many pods of the group must fit; None if the group does not exist."""
        if names.LABEL_POD_GROUP not in found[0]["metadata"]["labels"]:
            return 1
        known = self.objects.get(("PodGroup", group))
        return int(known["spec"]["minMember"]) if known else None

    def engine_pods(self) -> dict[str, Object]:
        return {name: pod for name, pod in self.pods.items() if "-engine-" in name}

    def placed(self) -> dict[int, int]:
        """Return the number of pods with a node, by engine."""
        found: dict[int, int] = defaultdict(int)
        for name, pod in self.engine_pods().items():
            found[int(name.split("-")[2])] += "nodeName" in pod["spec"]
        return dict(found)

    def step(self) -> None:
        self.execute(self.plan().actions)
        self.settle()


def spec(replicas: int = 3, base: int = 2, nodes: int = 1, **more: Any) -> Object:
    engine: Object = {"image": "example.org/engine:1", "gpuResource": "", "parallelism": {"tensor": 4}}
    engine |= {"nodes": nodes} if nodes > 1 else {}
    elastic = {"elastic": {"base": base}} if base else {}
    return {"replicas": replicas, "engine": engine, **elastic, **more}


BASE: Object = {"scheduling": {"gang": {"scope": "Base"}}}
ENGINE: Object = {"scheduling": {"gang": {"scope": "Engine"}}}


@given(replicas=st.integers(1, 5), base=st.integers(1, 5), nodes=st.sampled_from([1, 2]), room=st.integers(0, 10))
@settings(deadline=None, max_examples=30)
def test_engines_and_the_base_start_completely_or_not_at_all(replicas: int, base: int, nodes: int, room: int) -> None:
    base = min(base, replicas)
    cluster = Room(rollout(**spec(replicas, base, nodes, **BASE)), room=room)
    for _ in range(8):
        cluster.step()
        placed = cluster.placed()
        first = {placed.get(index, 0) for index in range(base)}
        assert first in ({0}, {nodes}), "the base started in part"
        assert set(placed.values()) <= {0, nodes}, "an engine started in part"
        if first == {0}:
            assert sum(placed.values()) == 0, "an engine took the room that the base waits for"
    fits = room // nodes
    assert len(cluster.serving()) == (min(replicas, fits) if fits >= base else 0)
    cluster.room = replicas * nodes
    for _ in range(4):
        cluster.step()
    assert len(cluster.serving()) == replicas, "they come when there is room"


SPECS = st.builds(
    lambda replicas, base, nodes, gang: spec(replicas, min(base, replicas), nodes, **gang),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([1, 2]),
    st.sampled_from([BASE, ENGINE, {}]),
)


@given(first=SPECS, then=SPECS)
@settings(deadline=None, max_examples=30)
def test_rolling_update_between_any_two_shapes_ends(first: Object, then: Object) -> None:
    """Engines enter and leave the base, with other numbers of pods. No group waits for pods of another group."""
    cluster = Room(rollout(**first))
    cluster.run()
    cluster.edit_spec({**cluster.cr["spec"], "scheduling": {}, "elastic": None, **copy.deepcopy(then)})
    cluster.run(rounds=60)
    assert len(cluster.serving()) == then["replicas"]
    groups = {name: child["spec"]["minMember"] for (kind, name), child in cluster.objects.items() if kind == "PodGroup"}
    nodes, base = then["engine"].get("nodes", 1), then["elastic"]["base"]
    wanted = {f"demo-engine-{index}": nodes for index in range(then["replicas"])} if "scheduling" in then else {}
    if then.get("scheduling") == BASE["scheduling"]:
        wanted = {"demo-base": base * nodes} | {f"demo-engine-{index}": nodes for index in range(base, then["replicas"])}
    assert groups == wanted


def test_engine_that_enters_the_base_never_starts_in_part() -> None:
    cluster = Room(rollout(**spec(2, 2, 2, **ENGINE)))
    cluster.run()
    cluster.edit_spec({**cluster.cr["spec"], **BASE})
    seen = []
    for _ in range(12):
        cluster.room = 3  # another workload takes one of the two places that the first engine frees
        cluster.step()
        seen.append(cluster.placed()[1])
    assert set(seen) <= {0, 2}
    assert seen[-1] == 0, "it has no room"
    assert cluster.placed()[0] == 2, "the other one serves on"


@pytest.mark.parametrize("gang", [BASE, {}], ids=["gang", "none"])
def test_base_is_created_first_and_existing_engines_stay(gang: Object) -> None:
    cluster = Room(rollout(**spec(3, 2, **gang)), room=1)
    cluster.step()
    cluster.step()
    assert {name for kind, name in cluster.objects if kind == "StatefulSet"} == {"demo-engine-0", "demo-engine-1"}
    cluster.room = 3
    cluster.run()
    assert len(cluster.serving()) == 3
    cluster.room = 2
    del cluster.pods["demo-engine-0-0"]
    for _ in range(3):
        cluster.step()
    assert cluster.serving() == {"demo-engine-1", "demo-engine-2"}, "which of them goes is the scheduler's to say, by priority"


def restarted(cluster: Room) -> list[str]:
    return [action.name for action in cluster.plan().actions if isinstance(action, Delete)]


def test_surplus_engine_without_room_does_not_block_a_rolling_update() -> None:
    cluster = Room(rollout(**spec(3, 2)), room=2)
    cluster.run()
    cluster.edit_spec({**cluster.cr["spec"], "model": {"path": "/models/other"}})
    cluster.step()
    assert restarted(cluster) == ["demo-engine-2-0"], "nothing is lost with it"
    cluster.step()
    assert restarted(cluster) == [], "it has just been made: it may only be on its way"
    assert cluster.plan().requeue_after is not None
    cluster.now = LATER
    assert restarted(cluster) == ["demo-engine-1-0"]
    cluster.step()
    assert restarted(cluster) == ["demo-engine-0-0"]
    cluster.converge()
    assert cluster.serving() == {"demo-engine-0", "demo-engine-1"}


def test_base_engine_without_room_blocks_a_rolling_update() -> None:
    cluster = Room(rollout(**spec(3, 2)), room=3)
    cluster.run()
    cluster.room = 2
    del cluster.pods["demo-engine-0-0"]
    cluster.step()
    cluster.edit_spec({**cluster.cr["spec"], "router": {"policy": "Random"}, "engine": {**spec()["engine"], "shm": "1Gi"}})
    cluster.now = LATER
    for _ in range(3):
        cluster.step()
    assert cluster.serving() == {"demo-engine-1", "demo-engine-2"}
    assert restarted(cluster) == []


@pytest.mark.parametrize("gang", [BASE, ENGINE], ids=["Base", "Engine"])
def test_partly_preempted_engine_releases_its_room_and_returns_completely(gang: Object) -> None:
    cluster = Room(rollout(**spec(2, 1, 2, **gang)), room=4)
    cluster.run()
    cluster.room = 3
    del cluster.pods["demo-engine-1-1"]
    cluster.step()
    assert cluster.placed() == {0: 2, 1: 1}
    assert restarted(cluster) == [], "its place may be free again in a moment"
    assert cluster.plan().requeue_after is not None
    cluster.now = LATER
    assert restarted(cluster) == ["demo-engine-1-0"]
    cluster.step()
    cluster.converge()
    assert cluster.placed() == {0: 2, 1: 0}
    cluster.room = 4
    cluster.converge()
    assert cluster.serving() == {"demo-engine-0", "demo-engine-1"}


def test_starting_engine_keeps_its_room() -> None:
    cluster = Room(rollout(**spec(2, 1, 2, **BASE)), room=3)
    cluster.run()
    cluster.now = LATER
    assert cluster.placed() == {0: 2, 1: 0}
    first = cluster.pods["demo-engine-1-0"]
    first["spec"]["nodeName"] = "node"
    first["status"]["startTime"] = LATER
    assert restarted(cluster) == []


@pytest.mark.parametrize(("base", "gang"), [(2, BASE), (2, ENGINE), (1, {})], ids=["of the base", "of the base by engine", "no gang"])
def test_partly_preempted_engine_without_a_group_of_its_own_is_left_alone(base: int, gang: Object) -> None:
    cluster = Room(rollout(**spec(2, base, 2, **gang)), room=4)
    cluster.run()
    cluster.room = 3
    del cluster.pods["demo-engine-1-1"]
    cluster.step()
    cluster.now = LATER
    assert cluster.placed() == {0: 2, 1: 1}
    assert restarted(cluster) == []


def uids(cluster: Cluster) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items() if "-engine-" in name}


@pytest.mark.parametrize(
    ("before", "after", "moved"),
    [
        pytest.param(spec(4, 0), spec(4, 2), set(), id="a base changes no pod by itself"),
        pytest.param(spec(4, 1), spec(4, 3), set(), id="nor does its size"),
        pytest.param(spec(4, 1, **BASE), spec(4, 3, **BASE), {1, 2}, id="engines come into the group of the base"),
        pytest.param(spec(4, 4, **BASE), spec(4, 2, **BASE), {2, 3}, id="engines leave it"),
        pytest.param(spec(4, 2), spec(4, elastic={"base": 2, "priorityClassName": "spare"}), {2, 3}, id="another priority beyond the base"),
    ],
)
def test_only_engines_that_enter_or_leave_the_base_are_restarted(before: Object, after: Object, moved: set[int]) -> None:
    cluster = Room(rollout(**before))
    cluster.run()
    old = uids(cluster)
    cluster.edit_spec({**cluster.cr["spec"], **after})
    cluster.converge()
    new = uids(cluster)
    assert {int(name.split("-")[2]) for name in new if new[name] != old[name]} == moved
    assert len(cluster.serving()) == 4


def test_scaling_down_removes_surplus_engines_first() -> None:
    cluster = Room(rollout(**spec(4, 2, **BASE)))
    cluster.run()
    old = uids(cluster)
    cluster.edit_spec({**cluster.cr["spec"], "replicas": 2})
    assert [name for name in restarted(cluster) if name.startswith("demo")][:2] == ["demo-engine-3", "demo-engine-3"]
    cluster.converge()
    assert uids(cluster) == {name: uid for name, uid in old.items() if name in {"demo-engine-0-0", "demo-engine-1-0"}}
