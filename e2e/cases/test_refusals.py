"""Invalid input is refused with a message that names the mistake, and the fleet stays as it is."""

from __future__ import annotations

import time

import pytest
import requests

from e2e.cases.actions import document, generate
from e2e.cases.conftest import sample
from e2e.kube import Kubectl, Refused, condition, eventually
from e2e.machine_token import HEADERS

GROUP = {"master_address": "192.0.2.1", "master_port": 29500, "rank_offset": 1, "world_size": 3, "group_name": "g", "backend": "gloo"}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (GROUP | {"world_size": 7}, "Use world_size=3"),
        (GROUP | {"rank_offset": 2}, "rank_offset"),
        ({"world_size": 3}, "master_address"),
    ],
    ids=["world-size", "rank-offset", "no-address"],
)
def test_wrong_group_is_refused_before_an_engine_joins(url: str, both_serve: None, body: dict[str, object], sentence: str) -> None:
    reply = requests.post(f"{url}/init_weights_update_group", json=body, headers=HEADERS, timeout=30)
    assert reply.status_code == 400
    assert sentence in reply.json()["message"]
    assert sentence in reply.reason, "clients print the reason phrase and drop the body"
    assert document(url)["groups"] == []
    assert generate(url).status_code == 200


def test_unreachable_trainer_is_refused_within_the_deadline(kubectl: Kubectl, fleet: str, url: str, both_serve: None) -> None:
    limit = kubectl.get("sglr", fleet)["spec"]["weights"]["deadlines"]["groupSeconds"]
    reply = requests.post(f"{url}/init_weights_update_group", json=GROUP, headers=HEADERS, timeout=limit + 30)
    assert reply.status_code in (400, 504)
    assert "192.0.2.1" in reply.json()["message"]
    assert document(url)["groups"] == []
    assert generate(url).status_code == 200


def test_update_with_an_unknown_group_reaches_no_engine(url: str, both_serve: None) -> None:
    body = {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "unknown"}
    reply = requests.post(f"{url}/update_weights_from_distributed", json=body, headers=HEADERS, timeout=30)
    assert reply.status_code == 400
    assert "unknown" in reply.json()["message"]
    assert document(url)["serving"] == 2


def test_malformed_bodies_are_refused_and_the_fleet_serves(url: str, both_serve: None) -> None:
    malformed = requests.post(f"{url}/init_weights_update_group", data=b'{"a":', headers=HEADERS, timeout=30)
    assert malformed.status_code == 400
    assert "JSON" in malformed.json()["message"]
    try:
        huge = requests.post(f"{url}/init_weights_update_group", data=b"x" * 100_000_000, headers=HEADERS, timeout=60)
        assert huge.status_code == 413
    except requests.ConnectionError:
        pass  # refused before the body was sent: the connection is closed under the sender
    assert generate(url).status_code == 200


@pytest.mark.parametrize(
    ("engine", "model", "reason", "words"),
    [
        ({"image": "localhost/no-such-image:1"}, {}, "ImagePullFailed", ["broken-engine-0", "no-such-image"]),
        (
            {"args": ["--device", "cpu", "--no-such-flag"], "acceptFlags": ["--no-such-flag"]},
            {},
            "EngineCrashed",
            ["broken-engine-0", "--no-such-flag"],
        ),
        ({"gpuResource": "nvidia.com/gpu", "gpusPerPod": 1}, {}, "InsufficientCapacity", ["broken-engine-0", "nvidia.com/gpu"]),
        ({}, {"path": "/models/absent"}, "EngineCrashed", ["broken-engine-0", "exited with code 1: OSError", "'/models/absent'"]),
    ],
    ids=["image", "crash", "no-gpu", "no-model"],
)
def test_status_explains_why_an_engine_cannot_start(
    kubectl: Kubectl, operator: Kubectl, engine: dict[str, object], model: dict[str, str], reason: str, words: list[str]
) -> None:
    document = sample("broken", **engine)
    document["spec"]["model"] |= model
    document["spec"]["replicas"] = 1
    if "image" in engine:
        document["spec"].setdefault("podTemplate", {})
    try:
        kubectl.apply(document)

        def explained() -> bool:
            found = condition(kubectl.get("sglr", "broken"), "Ready")
            return found["reason"] == reason and all(word in found["message"] for word in words)

        eventually(f"Ready has reason {reason} and names {words}", explained, within=240, every=2)
        time.sleep(5)
        seen = set()
        for _ in range(20):
            seen.add(kubectl.get("sglr", "broken")["metadata"]["resourceVersion"])
            time.sleep(0.25)
        assert len(seen) <= 4, "a hot loop would write the status many times in 5 s"
    finally:
        kubectl("delete", "sglr", "broken", "--wait=false")
        eventually("the pods are gone", lambda: not kubectl.list("pods", "rollout.sglang.io/rollout=broken"), within=180, every=2)


def test_apply_refuses_unknown_fields(kubectl: Kubectl, operator: Kubectl) -> None:
    with pytest.raises(Refused, match="unknown field"):
        kubectl.apply(sample("typo", tensorParallel=2))
