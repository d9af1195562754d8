"""The overlay of engine pods does not remove what other fields set."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.engines import engine_statefulsets
from tests.unit.controller.support.worlds import SETTINGS, cr

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
THEIRS = {"labelSelector": {"matchLabels": {"app": "cache"}}, "topologyKey": "kubernetes.io/hostname"}
OURS = {"labelSelector": {"matchLabels": names.selector("demo", "engine", "demo-engine-0")}, "topologyKey": "rack"}
TRAINER = {"labelSelector": {"matchLabels": {"app": "trainer"}}, "topologyKey": "kubernetes.io/hostname"}
RACK: dict[str, Any] = {"scheduling": {"topologyKey": "rack"}}
SHARED: dict[str, Any] = {"mode": "Hybrid", "sharing": {"trainerLabels": {"app": "trainer"}}}


def template(overlay: dict[str, Any], *, avoided: tuple[str, ...] = (), **spec: Any) -> dict[str, Any]:
    rollout = SGLangRollout.model_validate(cr(podTemplate=overlay, **spec))
    made: dict[str, Any] = engine_statefulsets(rollout, SETTINGS, avoided)[0]["spec"]["template"]
    return made


@pytest.mark.parametrize(
    ("spec", "overlaid", "expected"),
    [
        (RACK, {"podAffinity": {REQUIRED: [THEIRS]}}, [THEIRS, OURS]),
        (RACK, {"podAffinity": {REQUIRED: [THEIRS, OURS]}}, [THEIRS, OURS]),
        (RACK, {"podAffinity": {REQUIRED: None}}, [OURS]),
        (RACK, {"podAffinity": None}, [OURS]),
        (RACK, None, [OURS]),
        (RACK, {"podAntiAffinity": {REQUIRED: [THEIRS]}}, [OURS]),
        (SHARED, {"podAffinity": {REQUIRED: [THEIRS]}}, [THEIRS, TRAINER]),
        (RACK | SHARED, {"podAffinity": {REQUIRED: [THEIRS]}}, [THEIRS, OURS, TRAINER]),
        ({}, {"podAffinity": {REQUIRED: [THEIRS]}}, [THEIRS]),
    ],
)
def test_terms_for_topology_and_trainers_node_are_kept(spec: dict[str, Any], overlaid: object, expected: list[object]) -> None:
    affinity = template({"spec": {"affinity": overlaid}}, **spec)["spec"]["affinity"]
    assert affinity["podAffinity"][REQUIRED] == expected
    if isinstance(overlaid, dict) and "podAntiAffinity" in overlaid:
        assert affinity["podAntiAffinity"] == overlaid["podAntiAffinity"]


def test_avoided_nodes_are_added_to_the_affinity() -> None:
    affinity = template({"spec": {"affinity": {"podAffinity": {REQUIRED: [THEIRS]}}}}, avoided=("bad",), **RACK)["spec"]["affinity"]
    assert affinity["podAffinity"][REQUIRED] == [THEIRS, OURS]
    assert affinity["nodeAffinity"][REQUIRED]["nodeSelectorTerms"][0]["matchFields"][0]["values"] == ["bad"]


@pytest.mark.parametrize("wrong", ["near", ["near"], {"podAffinity": ["near"]}, {"podAffinity": {REQUIRED: 5}}])
def test_affinity_of_another_shape_is_left_to_the_api_server(wrong: object) -> None:
    """The API server refuses it, and status quotes the API server."""
    assert template({"spec": {"affinity": wrong}}, **RACK)["spec"]["affinity"] == wrong


def test_overlay_does_not_change_the_label_of_the_pod_group() -> None:
    overlay = {"metadata": {"labels": {names.LABEL_POD_GROUP: "mine", "team": "rl"}}}
    labels = template(overlay, scheduling={"gang": {}})["metadata"]["labels"]
    assert (labels[names.LABEL_POD_GROUP], labels["team"]) == ("demo-engine-0", "rl")
    assert template(overlay)["metadata"]["labels"][names.LABEL_POD_GROUP] == "mine", "without gang it is the user's"
