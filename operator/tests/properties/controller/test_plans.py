"""Any state converges, a second pass plans nothing, and a rolling update never stops a second engine."""

from __future__ import annotations

import base64
import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_rollout.controller.decide.plan import Apply, Delete
from sglang_rollout.controller.render.fleet_objects import with_token
from sglang_rollout.credentials import Credentials
from tests.properties.support.simulated_cluster import SETTINGS, Cluster, Object, rollout

images = st.sampled_from(["example.org/engine:1", "example.org/engine:2", "example.org/broken:3"])


def engine(image: str, nodes: int) -> dict[str, Any]:
    """Several pods come with ranks for them."""
    return {"image": image, "gpuResource": ""} | ({"nodes": nodes, "parallelism": {"tensor": 4}} if nodes > 1 else {})


specs: st.SearchStrategy[Object] = st.fixed_dictionaries(
    {
        "replicas": st.integers(0, 4),
        "model": st.sampled_from([{"path": "/models/a"}, {"path": "/models/b"}]),
        "engine": st.builds(engine, images, st.sampled_from([1, 1, 2, 4])),
        "router": st.builds(lambda policy: {"policy": policy}, st.sampled_from(["CacheAware", "Random"])),
    }
)
HEALTHY: Object = {"replicas": 3, "model": {"path": "/models/a"}, "engine": {"image": "example.org/engine:1", "gpuResource": ""}}


def damage(cluster: Cluster, seed: list[int]) -> None:
    """Delete and edit children in a way that depends on ``seed`` alone."""
    for number in seed:
        keys = sorted(cluster.objects)
        if not keys:
            return
        key = keys[number % len(keys)]
        if number % 3 == 0:
            del cluster.objects[key]
        elif number % 3 == 1:
            cluster.objects[key]["metadata"]["labels"].popitem()
        elif "spec" in cluster.objects[key]:
            cluster.objects[key]["spec"].popitem()
            cluster.objects[key]["metadata"]["generation"] += 1


@example(
    first={**HEALTHY, "engine": engine("example.org/engine:1", 2), "router": {"policy": "Random"}},
    then={**HEALTHY, "replicas": 2, "router": {"policy": "Random"}},
    harm=[75, 0, 0, 188],
)  # a StatefulSet of two pods is deleted, its pods stay, and the next one has one pod
@given(first=specs, then=specs, harm=st.lists(st.integers(0, 1000), max_size=6))
@settings(deadline=None, max_examples=30)
def test_any_state_converges_and_a_second_pass_plans_nothing(first: Any, then: Any, harm: list[int]) -> None:
    cluster = Cluster(rollout(**first))
    cluster.execute(cluster.plan().actions)
    cluster.settle()
    damage(cluster, harm)
    cluster.edit_spec(then)
    broken = "broken" in then["engine"]["image"]
    cluster.run()  # an engine that cannot come up holds a rolling update: that is no convergence, but right
    assert cluster.plan().actions == ()
    if not broken:
        assert len(cluster.serving()) == then["replicas"]
        assert cluster.plan().requeue_after is None
    engines = {name for kind, name in cluster.objects if kind == "StatefulSet"}
    assert engines == {f"demo-engine-{index}" for index in range(then["replicas"])}


@given(then=specs.filter(lambda spec: spec["replicas"] >= 3))
@settings(deadline=None, max_examples=20)
def test_a_rolling_update_keeps_all_engines_but_one(then: Any) -> None:
    cluster = Cluster(rollout(**HEALTHY))
    cluster.converge()
    cluster.edit_spec(then)
    for _ in range(20):
        before = cluster.serving()
        made = cluster.plan()
        if not made.actions:
            break
        restarts = [action for action in made.actions if isinstance(action, Delete)]
        wanted = {f"demo-engine-{index}" for index in range(then["replicas"])}
        lost = {action.name.rpartition("-")[0] if action.kind == "Pod" else action.name for action in restarts} & before & wanted
        assert len(lost) <= 1, "two engines that serve were restarted at once"
        cluster.execute(made.actions)
        cluster.settle()


@pytest.mark.parametrize("overlay", [{"nodeSelector": {}}, {"rewritten": "As It Is Written"}])
def test_defaulting_of_a_template_does_not_block_a_rolling_update(overlay: Any) -> None:
    spec = {**HEALTHY, "podTemplate": {"spec": overlay}}
    cluster = Cluster(rollout(**spec))
    for image in ("example.org/engine:1", "example.org/engine:2"):
        cluster.edit_spec({**spec, "engine": {"image": image, "gpuResource": ""}})
        for _ in range(8):
            cluster.execute(cluster.plan().actions)
            cluster.settle()
        assert {pod["spec"]["containers"][0]["image"] for pod in cluster.pods.values()} == {image}
    assert len(cluster.serving()) == 3


def test_edited_template_is_healed_before_a_pod_is_created_from_it() -> None:
    cluster = Cluster(rollout(**HEALTHY))
    cluster.converge()
    cluster.edit_spec({**HEALTHY, "engine": {"image": "example.org/engine:2", "gpuResource": ""}})
    cluster.execute(cluster.plan().actions)
    cluster.settle()
    for index in range(3):
        child = cluster.take_fields("StatefulSet", f"demo-engine-{index}")
        child["spec"]["template"]["spec"]["containers"][0]["image"] = "example.org/foreign:1"
        child["metadata"] |= {"generation": 9, "resourceVersion": f"edited-{index}"}
    cluster.settle()
    before = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}
    cluster.execute(cluster.plan().actions)
    assert {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()} == before
    cluster.converge()
    assert {pod["spec"]["containers"][0]["image"] for pod in cluster.pods.values()} == {"example.org/engine:2"}


def test_a_broken_image_stops_the_rolling_update_at_the_first_engine() -> None:
    cluster = Cluster(rollout(**HEALTHY))
    cluster.converge()
    bad = copy.deepcopy(HEALTHY)
    bad["engine"]["image"] = "example.org/broken:1"
    cluster.edit_spec(bad)
    cluster.run()
    assert cluster.serving() == {"demo-engine-0", "demo-engine-1"}
    assert cluster.plan().requeue_after is not None, "the plan looks again"

    cluster.edit_spec(HEALTHY)
    cluster.converge()
    assert len(cluster.serving()) == 3


def test_first_pass_creates_everything_and_the_second_nothing() -> None:
    cluster = Cluster(rollout())
    made = cluster.plan()
    assert all(isinstance(action, Apply) for action in made.actions)
    kinds = [action.object["kind"] for action in made.actions if isinstance(action, Apply)]
    assert kinds.count("StatefulSet") == 2
    assert kinds[-1] == "StatefulSet", "engines come last: what their pods need is there"
    cluster.execute(made.actions)
    assert cluster.plan().actions == ()


def test_scaling_down_removes_the_highest_index_first() -> None:
    cluster = Cluster(rollout(replicas=4))
    cluster.converge()
    cluster.edit_spec({**cluster.cr["spec"], "replicas": 1})
    deleted = [action.name for action in cluster.plan().actions if isinstance(action, Delete)]
    assert deleted == ["demo-engine-3", "demo-engine-2", "demo-engine-1"]


def test_restarted_operator_applies_each_child_once_and_changes_nothing() -> None:
    cluster = Cluster(rollout())
    cluster.converge()
    before = {key: child["metadata"]["resourceVersion"] for key, child in cluster.objects.items()}
    cluster.ownership.clear()
    made = cluster.plan()
    assert {(a.object["kind"], a.object["metadata"]["name"]) for a in made.actions if isinstance(a, Apply)} == before.keys()
    cluster.execute(made.actions)
    assert cluster.plan().actions == ()
    assert {key: child["metadata"]["resourceVersion"] for key, child in cluster.objects.items()} == before


def test_new_release_of_the_operator_restarts_no_engine() -> None:
    cluster = Cluster(rollout())
    cluster.converge()
    uids = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}
    cluster.converge(replace(SETTINGS, coordinator_image="example.org/coordinator:2", router_image="example.org/router:2"))
    assert {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()} == uids


def test_changing_only_the_router_or_the_deadlines_restarts_no_engine() -> None:
    cluster = Cluster(rollout())
    cluster.converge()
    uids = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}
    cluster.edit_spec({**cluster.cr["spec"], "router": {"policy": "Random"}, "weights": {"backend": "gloo"}})
    cluster.converge()
    assert {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()} == uids


def test_no_pod_is_deleted_before_its_statefulset_has_the_new_template() -> None:
    cluster = Cluster(rollout())
    cluster.converge()
    cluster.edit_spec({**cluster.cr["spec"], "model": {"path": "/models/other"}})
    made = cluster.plan()
    assert not [action for action in made.actions if isinstance(action, Delete)]
    cluster.execute(made.actions)
    # The StatefulSet controller has not looked yet.
    assert cluster.plan().actions == ()
    cluster.settle()
    (restart,) = cluster.plan().actions
    assert isinstance(restart, Delete)
    assert restart.name == "demo-engine-1-0"


def test_engine_without_the_committed_weights_blocks_a_rolling_update() -> None:
    cluster = Cluster(rollout())
    cluster.converge()
    cluster.edit_spec({**cluster.cr["spec"], "model": {"path": "/models/other"}})
    cluster.execute(cluster.plan().actions)
    cluster.settle()
    cluster.execute(cluster.plan().actions)
    cluster._statefulsets()
    cluster._kubelet()
    # The pod is ready, but the coordinator has not opened its gate: it waits for the trainer's next push.
    record = cluster.objects["ConfigMap", "demo-weights"]["data"]
    rows = record["weights.json"]
    record["weights.json"] = rows.replace('"gate_open":true', '"gate_open":false', 2).replace('"gate_open":false', '"gate_open":true', 1)
    made = cluster.plan()
    assert made.actions == ()
    assert made.requeue_after is not None


def test_rollout_waits_for_leftovers_of_an_earlier_one() -> None:
    cluster = Cluster(rollout())
    cluster.converge()
    cluster.cr["metadata"]["uid"] = "uid-of-the-new-one"
    made = cluster.plan()
    assert made.actions == (), "the garbage collector removes them"
    assert made.requeue_after is not None
    cluster.objects.clear()
    cluster.pods.clear()
    cluster.converge()
    assert len(cluster.serving()) == 2


def test_only_unseen_objects_are_checked_for_ownership() -> None:
    cluster = Cluster(rollout())
    cluster.converge()
    del cluster.objects["Service", "demo-router"]
    cluster.take_fields("Role", "demo-router")["rules"] = []
    actions = {(a.object["kind"], a.unseen) for a in cluster.plan().actions if isinstance(a, Apply)}
    assert actions == {("Service", True), ("Role", False)}


def test_orphans_are_adopted() -> None:
    cluster = Cluster(rollout())
    cluster.converge()
    cluster.cr["metadata"]["uid"] = "uid-of-the-new-one"
    for child in cluster.objects.values():
        child["metadata"]["ownerReferences"] = []
    assert all(isinstance(action, Apply) for action in cluster.plan().actions)
    uids = {pod["metadata"]["uid"] for pod in cluster.pods.values()}
    cluster.converge()
    assert {pod["metadata"]["uid"] for pod in cluster.pods.values()} == uids


def test_key_is_created_once_and_kept() -> None:
    cluster = Cluster(rollout())
    made = [a for a in cluster.plan().actions if isinstance(a, Apply) and a.object["kind"] == "Secret"]
    assert [(a.object["metadata"]["name"], a.is_new_key) for a in made] == [("demo-control", True), ("demo-credentials", False)]
    cluster.converge()
    live = cluster.take_fields("Secret", "demo-control")
    live["metadata"]["labels"].pop("app.kubernetes.io/name")
    (healed,) = [a for a in cluster.plan().actions if isinstance(a, Apply)]
    assert not healed.is_new_key
    assert healed.object["data"] == live["data"]
    live["data"] = {}
    (emptied,) = [a for a in cluster.plan().actions if isinstance(a, Apply)]
    assert emptied.is_new_key
    assert emptied.object["data"]


def test_the_credentials_follow_the_key_and_the_engines() -> None:
    cluster = Cluster(rollout())
    cluster.converge()
    uids = {pod["metadata"]["uid"] for pod in cluster.pods.values()}
    key = Credentials("new", "old")
    cluster.objects["Secret", "demo-control"] = with_token(cluster.objects["Secret", "demo-control"], "\n".join(key.lines()))
    cluster.edit_spec({**cluster.cr["spec"], "replicas": 3})
    cluster.converge()
    assert uids <= {pod["metadata"]["uid"] for pod in cluster.pods.values()}, "no engine restarts"
    found = cluster.objects["Secret", "demo-credentials"]["data"]
    assert {name: base64.b64decode(text).decode().split() for name, text in found.items()} == {
        name: list(key.derive(name).lines()) for name in ("demo-engine-0", "demo-engine-1", "demo-engine-2")
    }


def test_deleted_or_invalid_rollout_has_an_empty_plan() -> None:
    deleting = rollout()
    deleting["metadata"]["deletionTimestamp"] = "2026-11-21T03:00:00Z"
    assert Cluster(deleting).plan().actions == ()
    unreadable = rollout(engine={"img": "x"})
    cluster = Cluster(unreadable)
    assert "engine.image" in cluster.observe().invalid
    assert cluster.plan().actions == ()
