"""`spec.state`: a fleet that is paused, asleep or suspended keeps its URL and its version."""

from __future__ import annotations

import json

from e2e.cases.actions import document, generate
from e2e.cases.stand_in_rollout import StandInRollout
from e2e.kube import eventually


def set_state(stand: StandInRollout, state: str) -> None:
    stand.kubectl("patch", "sglr", stand.name, "--type", "merge", "-p", json.dumps({"spec": {"state": state}}))


def engine_pods(stand: StandInRollout) -> int:
    selector = f"rollout.sglang.io/rollout={stand.name},app.kubernetes.io/component=engine"
    return len(stand.kubectl("get", "pods", "-l", selector, "-o", "name").split())


def test_paused_fleet_takes_weights_and_opens_no_gate(stand: StandInRollout) -> None:
    trainer = stand.trainer()
    stand.push(trainer)
    set_state(stand, "Paused")
    try:
        eventually("status reports the pause", lambda: stand.condition("Ready")["message"].startswith("Paused by spec.state: 3 of 3"))
        assert all(stand.state(index)["paused"] for index in range(3))
        reply = generate(stand.url)
        assert (reply.status_code, "spec.state: Paused" in reply.text, "Retry-After" in reply.headers) == (503, True, True), reply.text
        label = stand.push(trainer)
        assert document(stand.url)["serving"] == 0
        eventually("status names the new version", lambda: f"hold version {label}" in stand.condition("Ready")["message"])
        # The record of the version may come before the one that ends its update.
        eventually("the engines are paused again", lambda: [row["phase"] for row in stand.status()["engines"]] == ["Paused"] * 3)
        assert "Paused" in stand.kubectl("get", "sglr", stand.name)
    finally:
        set_state(stand, "Active")
    stand.serve()
    trainer.end()
    assert document(stand.url)["committed"]["label"] == label
    assert any(event.startswith("Paused ") for event in stand.events())


def test_sleeping_fleet_releases_memory_and_wakes_with_its_version(stand: StandInRollout) -> None:
    trainer = stand.trainer()
    label = stand.push(trainer)
    trainer.end()
    tokens = generate(stand.url).json()["output_ids"]
    set_state(stand, "Asleep")
    try:
        eventually("status reports the sleep", lambda: stand.condition("Ready")["message"].startswith("Asleep by spec.state: 3 of 3"))
        for index in range(3):
            assert sorted(stand.state(index)["released"]) == ["cuda_graph", "kv_cache", "weights"]
        assert "spec.state: Asleep" in generate(stand.url).text
        assert [row["phase"] for row in stand.status()["engines"]] == ["Asleep"] * 3
    finally:
        set_state(stand, "Active")
    stand.serve()
    assert document(stand.url)["committed"]["label"] == label
    reply = eventually("the fleet generates again", lambda: generate(stand.url).json().get("output_ids"))
    assert reply == tokens


def test_suspended_fleet_runs_no_engine_and_keeps_url_run_and_version(stand: StandInRollout) -> None:
    trainer = stand.trainer()
    label = stand.push(trainer)
    trainer.end()
    before = document(stand.url)["committed"]
    assert engine_pods(stand) == 3
    set_state(stand, "Suspended")
    try:
        eventually("no engine runs", lambda: engine_pods(stand) == 0)
        eventually("Ready has reason Suspended", lambda: stand.condition("Ready")["reason"] == "Suspended")
        assert f"version {label}" in stand.condition("Ready")["message"]
        assert "Suspended" in stand.kubectl("get", "sglr", stand.name)
        reply = generate(stand.url)
        assert (reply.status_code, "Retry-After" in reply.headers) == (503, True), reply.text
        assert document(stand.url)["committed"] == before
    finally:
        set_state(stand, "Active")
    eventually("all engines are members again", lambda: document(stand.url)["world_size"] == 4)
    assert document(stand.url)["committed"] == before, "engines that start with other weights do not change the committed version"
    trainer = stand.trainer()
    stand.push(trainer)
    after = document(stand.url)
    assert (after["committed"]["run"], after["committed"]["step"]) == (before["run"], before["step"] + 1)
    stand.serve()
    assert stand.condition("Ready")["reason"] != "Suspended"
