"""Overlay, quantities, drift, revision: the small pure pieces."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.drift import find_difference, read_ownership, stamp
from sglang_rollout.controller.render import names, render_all
from sglang_rollout.controller.render.common import parse_quantity
from sglang_rollout.controller.render.engine_arguments import server_args
from sglang_rollout.controller.render.fleet_objects import intent, token_of, with_token
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
        ("a", "1", False),
    ],
)
def test_quantities(one: Any, other: Any, equal: bool) -> None:
    assert (parse_quantity(one) == parse_quantity(other)) is equal


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


RENDERED: Object = {"kind": "X", "metadata": {"name": "n"}, "spec": {"containers": [{"name": "engine"}], "hostNetwork": False}}
FIELDS: Object = {"f:spec": {"f:containers": {}, "f:hostNetwork": {}}}


def owned(fields: Object, **entry: str) -> Object:
    """An entry of managedFields."""
    return {"manager": names.FIELD_MANAGER, "operation": "Apply", "fieldsV1": fields, **entry}


def test_object_whose_fields_the_operator_still_owns_is_not_applied_again() -> None:
    live = live_of(RENDERED)
    live["metadata"] |= {"uid": "u", "managedFields": [owned(FIELDS)]}
    known = {"u": read_ownership(live)}
    live["spec"]["dnsPolicy"] = "ClusterFirst"
    live["metadata"]["managedFields"] += [owned({"f:status": {}}, subresource="status"), owned({"f:spec": {}}, manager="kubectl")]
    assert find_difference(stamp(RENDERED), live, known) == "", "defaults, the status and additions of other clients do not matter"


def test_field_that_another_client_took_is_drift() -> None:
    live = live_of(RENDERED)
    live["metadata"] |= {"uid": "u", "managedFields": [owned(FIELDS)]}
    known = {"u": read_ownership(live)}
    for fewer in ([owned({"f:spec": {"f:containers": {}}})], [], None):
        live["metadata"]["managedFields"] = fewer
        assert find_difference(stamp(RENDERED), live, known) == "another client changed it"


def test_object_is_applied_once_after_a_restart() -> None:
    live = live_of(RENDERED)
    assert find_difference(stamp(RENDERED), live, {}) == "first apply of this operator process"
    assert find_difference(stamp(RENDERED), live) == "", "a preview compares no ownership"


def test_removed_field_is_drift() -> None:
    live = live_of(RENDERED)
    less = {**RENDERED, "spec": {"containers": [{"name": "engine"}]}}
    assert find_difference(stamp(less), live) == "the wanted object changed"


def test_annotation_does_not_depend_on_the_token() -> None:
    first, second = ([made for made in render_all(rollout(), SETTINGS, token=token) if made["kind"] == "Secret"] for token in ("a", "b"))
    assert [stamp(secret)["metadata"] for secret in first] == [stamp(secret)["metadata"] for secret in second]
    assert [secret["metadata"]["name"] for secret in first] == ["demo-control", "demo-credentials"]


def test_the_credentials_of_a_new_key_or_engine_are_drift() -> None:
    before, rotated, more = (
        next(made for made in render_all(made_from, SETTINGS, token=token) if made["metadata"]["name"] == "demo-credentials")
        for made_from, token in ((rollout(), "a"), (rollout(), "b\na"), (rollout(replicas=3), "a"))
    )
    assert find_difference(stamp(before), live_of(before)) == ""
    assert find_difference(stamp(rotated), live_of(before)) == "the credentials changed"
    assert find_difference(stamp(more), live_of(before)) == "the credentials changed"
    assert find_difference(stamp(before), live_of(more)) == "", "unused credentials stay until the next apply"


def test_the_operator_keeps_the_lines_of_a_rotation() -> None:
    edited = with_token({"kind": "Secret", "metadata": {"name": "demo-control"}}, "new\nold\n")
    rendered = next(made for made in render_all(rollout(), SETTINGS, token=token_of(edited)) if made["kind"] == "Secret")
    assert rendered["data"] == edited["data"]


def rollout(**spec: Any) -> SGLangRollout:
    return SGLangRollout.model_validate(cr(**spec))


def test_revision_depends_only_on_what_the_user_wrote() -> None:
    first = revision(rollout())
    engine = {"image": "example.org/engine:1", "gpuResource": ""}
    assert revision(rollout(engine={**engine, "parallelism": {"tensor": 1}, "args": [], "shm": "16Gi"})) == first, "defaults"
    assert revision(rollout(replicas=9, router={"policy": "Random"}, weights={"backend": "gloo"})) == first
    assert revision(rollout(engine={**engine, "args": ["--x"]})) != first
    assert revision(rollout(model={"path": "/models/other"})) != first
    assert revision(rollout(security={"generate": "Clients"})) == first
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
    written: list[Object] = [{"nodes": 1}, {"network": {}}]
    for more in written:
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
