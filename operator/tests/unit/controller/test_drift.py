"""Overlay, quantities, drift, revision: the small pure pieces."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.drift import find_difference, stamp
from sglang_rollout.controller.render import names, render_all
from sglang_rollout.controller.render.common import is_same_quantity
from sglang_rollout.controller.render.engine_arguments import server_args
from sglang_rollout.controller.render.fleet_objects import intent
from sglang_rollout.controller.render.hashing import revision
from sglang_rollout.controller.render.overlay import merge
from tests.support.paths import DOCS
from tests.unit.controller.support.worlds import SETTINGS, cr

Object = dict[str, Any]


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("1000m", "1", True),
        ("1024Mi", "1Gi", True),
        ("0.5", "500m", True),
        (2, "2", True),
        ("1e3", "1k", True),
        ("1G", "1Gi", False),
        ("a", "a", False),
    ],
)
def test_quantities(one: Any, other: Any, equal: bool) -> None:
    assert is_same_quantity(one, other) is equal


@pytest.mark.parametrize(
    ("base", "overlay", "merged"),
    [
        ({"a": {"b": 1}}, {"a": {"c": 2}}, {"a": {"b": 1, "c": 2}}),
        ({"a": 1, "b": 2}, {"a": None}, {"b": 2}),
        ({"args": ["x"]}, {"args": ["y"]}, {"args": ["y"]}),
        (
            {"env": [{"name": "A", "value": "1"}]},
            {"env": [{"name": "A", "value": "2"}, {"name": "B"}]},
            {"env": [{"name": "A", "value": "2"}, {"name": "B"}]},
        ),
        (
            {"volumeMounts": [{"name": "run", "mountPath": "/run"}]},
            {"volumeMounts": [{"name": "run", "mountPath": "/other"}]},
            {"volumeMounts": [{"name": "run", "mountPath": "/run"}, {"name": "run", "mountPath": "/other"}]},
        ),
        ({"ports": [{"containerPort": 1}]}, {"ports": [{"containerPort": 1, "protocol": "UDP"}]}, None),
        (
            {"initContainers": [{"name": "gate"}]},
            {"initContainers": [{"name": "fetch"}]},
            {"initContainers": [{"name": "fetch"}, {"name": "gate"}]},
        ),
        ({}, {"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "a"}]}),
        ({"a": 1}, {"a": {"b": None, "c": 1}}, {"a": {"c": 1}}),
    ],
)
def test_overlay(base: Object, overlay: Object, merged: Object | None) -> None:
    before = copy.deepcopy(base)
    made = merge(base, overlay)
    assert base == before, "the rendered pod is not changed in place"
    if merged is None:
        assert len(made["ports"]) == 2, "one port for TCP and one for UDP"
    else:
        assert made == merged


def live_of(rendered: Object) -> Object:
    return copy.deepcopy(stamp(rendered))


CONTAINER: Object = {
    "name": "engine",
    "args": ["a", "b"],
    "env": [{"name": "A", "value": "1"}],
    "resources": {"requests": {"cpu": "1000m"}},
    "securityContext": {"allowPrivilegeEscalation": False},
}
RENDERED: Object = {"kind": "X", "metadata": {"name": "n"}, "spec": {"containers": [CONTAINER], "hostNetwork": False}}


def test_defaults_and_foreign_additions_are_not_drift() -> None:
    live = live_of(RENDERED)
    live["metadata"] |= {"uid": "u", "labels": {"theirs": "x"}}
    live["spec"]["dnsPolicy"] = "ClusterFirst"
    del live["spec"]["hostNetwork"]
    container = live["spec"]["containers"][0]
    container["resources"]["requests"]["cpu"] = "1"
    container["env"].insert(0, {"name": "INJECTED", "value": "y"})
    live["spec"]["containers"].append({"name": "injected"})
    assert find_difference(stamp(RENDERED), live) == ""


@pytest.mark.parametrize(
    ("path", "edit"),
    [
        ("spec.containers[engine].args", lambda c: c["args"].append("c")),
        ("spec.containers[engine].args[0]", lambda c: c["args"].reverse()),
        ("spec.containers[engine].env[A]", lambda c: c["env"].clear()),
        ("spec.containers[engine].env[A].value", lambda c: c["env"][0].update(value="2")),
        ("spec.containers[engine].resources.requests.cpu", lambda c: c["resources"]["requests"].update(cpu="2")),
        ("spec.containers[engine].securityContext.allowPrivilegeEscalation", lambda c: c["securityContext"].clear()),
        ("spec.containers[engine]", lambda c: c.update(name="other")),
    ],
)
def test_edited_field_is_drift(path: str, edit: Any) -> None:
    live = live_of(RENDERED)
    edit(live["spec"]["containers"][0])
    assert find_difference(stamp(RENDERED), live) == path


def test_removed_field_is_drift() -> None:
    live = live_of(RENDERED)
    less = {**RENDERED, "spec": {"containers": [CONTAINER]}}
    assert find_difference(stamp(less), live) == "the wanted object changed"


def test_annotation_does_not_depend_on_the_token() -> None:
    first, second = (
        next(made for made in render_all(rollout(), SETTINGS, token=token) if made["kind"] == "Secret") for token in ("a", "b")
    )
    assert stamp(first)["metadata"] == stamp(second)["metadata"]


def rollout(**spec: Any) -> SGLangRollout:
    return SGLangRollout.model_validate(cr(**spec))


def test_revision_depends_only_on_what_the_user_wrote() -> None:
    first = revision(rollout())
    engine = {"image": "example.org/engine:1", "gpuResource": ""}
    assert revision(rollout(engine={**engine, "parallelism": {"tensor": 1}, "args": [], "shm": "16Gi"})) == first, "defaults"
    assert revision(rollout(replicas=9, router={"policy": "Random"}, weights={"backend": "gloo"})) == first
    assert revision(rollout(engine={**engine, "args": ["--x"]})) != first
    assert revision(rollout(model={"path": "/models/other"})) != first
    assert revision(rollout(podTemplate={"spec": {"nodeSelector": {"a": "b"}}})) != first
    lora = {"maxRank": 8, "targetModules": ["all"]}
    assert revision(rollout(engine={**engine, "lora": lora})) != first
    assert revision(rollout(engine={**engine, "lora": {**lora, "enabled": False}})) == first, "what is switched off"
    ganged = revision(rollout(scheduling={"gang": {}}))
    assert revision(rollout(scheduling={"gang": {"timeoutSeconds": 600}})) == ganged, "the PodGroup's alone"
    assert revision(rollout(scheduling={"gang": {"scheduler": "other", "timeoutSeconds": 600}})) != ganged != first


def test_writing_out_a_computed_default_changes_the_revision() -> None:
    engine: Object = {"image": "example.org/engine:1", "gpuResource": ""}
    first = revision(rollout())
    for more in ({"nodes": 1}, {"network": {}}):
        assert revision(rollout(engine={**engine, **more})) != first, more
    asking = [revision(rollout(engine={**engine, "resources": {"requests": {"cpu": cpu}}})) for cpu in (2, "2")]
    assert asking[0] != asking[1]
    page = (DOCS / "how-to/roll-engines.md").read_text()
    assert all(word in page for word in ("(`nodes`, `gpusPerPod`, `network.basePort`)", "(`network: {}`)", '(`cpu: 2` and `cpu: "2"`)'))


@pytest.mark.parametrize(("enabled", "adapters"), [(True, [{"name": "a", "path": "/a", "pinned": False}]), (False, None)])
def test_adapters_are_not_wanted_while_lora_is_disabled(enabled: bool, adapters: object) -> None:
    lora = {"enabled": enabled, "maxRank": 8, "targetModules": ["all"], "adapters": [{"name": "a", "path": "/a"}]}
    custom = rollout(engine={"image": "e:1", "lora": lora})
    assert json.loads(intent(custom, {})["data"][names.INTENT_KEY]).get("adapters") == adapters
    assert ("--enable-lora" in server_args(custom)) is enabled


def test_the_longest_name_fits_every_label() -> None:
    custom = cr(replicas=1000)
    custom["metadata"]["name"] = "a" * 40
    for made in render_all(SGLangRollout.model_validate(custom), SETTINGS):
        longest = made["metadata"]["name"] + ("-" + "x" * 10 if made["kind"] == "StatefulSet" else "")
        assert len(longest) <= 63
        assert all(len(value) <= 63 for value in made["metadata"]["labels"].values())


def test_additional_key_in_a_service_selector_is_drift() -> None:
    """The Service would select nothing: the fleet's URL is dead although every rendered key is there."""
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "demo-router", "namespace": "default"},
        "spec": {"selector": {"rollout": "demo"}},
    }
    live = stamp(service)
    assert find_difference(stamp(service), live) == ""
    added = live | {"spec": {"selector": {"rollout": "demo", "a": "b"}}}
    assert find_difference(stamp(service), added) == "spec.selector"


EMPTIED: Object = {
    "kind": "X",
    "metadata": {"name": "n", "labels": {}},
    "spec": {
        "nodeSelector": {},
        "schedulerName": "",
        "dnsPolicy": "",
        "containers": [{"name": "log", "imagePullPolicy": "", "resources": {"limits": {}}, "livenessProbe": {"periodSeconds": 0}}],
        "volumes": [{"name": "x", "emptyDir": {}}],
    },
}


def test_fields_that_the_api_server_drops_or_fills_in_are_not_drift() -> None:
    live = live_of(EMPTIED)
    del live["metadata"]["labels"], live["spec"]["nodeSelector"]
    live["spec"] |= {"schedulerName": "default-scheduler", "dnsPolicy": "ClusterFirst"}
    log = {"name": "log", "imagePullPolicy": "IfNotPresent", "resources": {}, "livenessProbe": {"periodSeconds": 10}}
    live["spec"]["containers"] = [log]
    assert find_difference(stamp(EMPTIED), live) == ""


def test_removed_empty_map_and_changed_empty_variable_are_drift() -> None:
    live = live_of(EMPTIED)
    live["spec"]["volumes"] = [{"name": "x", "hostPath": {"path": "/"}}]
    assert find_difference(stamp(EMPTIED), live) == "spec.volumes[x].emptyDir"
    empty = {**RENDERED, "spec": {"containers": [{"name": "engine", "env": [{"name": "A", "value": ""}]}]}}
    live = live_of(empty)
    live["spec"]["containers"][0]["env"][0]["value"] = "1"
    assert find_difference(stamp(empty), live) == "spec.containers[engine].env[A].value"
