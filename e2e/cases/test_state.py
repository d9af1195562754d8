"""`spec.state`: a fleet that generates nothing, holds no memory or takes no GPU for a while, and is the same fleet afterwards."""

from __future__ import annotations

import json

from e2e.cases.actions import document, generate
from e2e.cases.stand import Stand
from e2e.kube import eventually


def set_state(stand: Stand, state: str) -> None:
    stand.kubectl("patch", "sglr", stand.name, "--type", "merge", "-p", json.dumps({"spec": {"state": state}}))


def engine_pods(stand: Stand) -> int:
    selector = f"rollout.sglang.io/rollout={stand.name},app.kubernetes.io/component=engine"
    return len(stand.kubectl("get", "pods", "-l", selector, "-o", "name").split())


def test_paused_holds_the_fleet_takes_weights_and_opens_nothing(stand: Stand) -> None:
    trainer = stand.trainer()
    stand.push(trainer)
    set_state(stand, "Paused")
    try:
        eventually("status says it", lambda: stand.condition("Ready")["message"].startswith("Paused by spec.state: 3 of 3"), within=30)
        assert all(stand.state(index)["paused"] for index in range(3))
        reply = generate(stand.url)
        assert (reply.status_code, "spec.state: Paused" in reply.text, "Retry-After" in reply.headers) == (503, True, True), reply.text
        label = stand.push(trainer)
        assert document(stand.url)["serving"] == 0
        eventually("status says that they hold it", lambda: f"hold version {label}" in stand.condition("Ready")["message"], within=15)
        assert [row["phase"] for row in stand.status()["engines"]] == ["Paused"] * 3
        assert "Paused" in stand.kubectl("get", "sglr", stand.name)
    finally:
        set_state(stand, "Active")
    stand.serve()
    trainer.end()
    assert document(stand.url)["committed"]["label"] == label
    told = stand.events()
    assert any(event.startswith("Paused ") for event in told)


def test_asleep_gives_memory_back_and_wakes_with_what_it_held(stand: Stand) -> None:
    trainer = stand.trainer()
    label = stand.push(trainer)
    trainer.end()
    tokens = generate(stand.url).json()["output_ids"]
    set_state(stand, "Asleep")
    try:
        eventually("status says it", lambda: stand.condition("Ready")["message"].startswith("Asleep by spec.state: 3 of 3"), within=30)
        for index in range(3):
            assert sorted(stand.state(index)["released"]) == ["cuda_graph", "kv_cache", "weights"]
        assert "spec.state: Asleep" in generate(stand.url).text
        assert [row["phase"] for row in stand.status()["engines"]] == ["Asleep"] * 3
    finally:
        set_state(stand, "Active")
    stand.serve()
    assert document(stand.url)["committed"]["label"] == label
    reply = eventually("the router knows it", lambda: generate(stand.url).json().get("output_ids"), within=15)
    assert reply == tokens


def test_suspended_runs_no_engine_and_keeps_url_run_and_version(stand: Stand) -> None:
    trainer = stand.trainer()
    label = stand.push(trainer)
    trainer.end()
    before = document(stand.url)["committed"]
    assert engine_pods(stand) == 3
    set_state(stand, "Suspended")
    try:
        eventually("no engine runs", lambda: engine_pods(stand) == 0, within=90)
        eventually("status says why", lambda: stand.condition("Ready")["reason"] == "Suspended", within=15)
        assert f"version {label}" in stand.condition("Ready")["message"]
        assert "Suspended" in stand.kubectl("get", "sglr", stand.name)
        reply = generate(stand.url)
        assert (reply.status_code, "Retry-After" in reply.headers) == (503, True), reply.text
        assert document(stand.url)["committed"] == before
    finally:
        set_state(stand, "Active")
    eventually("all engines are members again", lambda: document(stand.url)["world_size"] == 4, within=120)
    assert document(stand.url)["committed"] == before, "engines that start with other weights do not change what is committed"
    trainer = stand.trainer()
    stand.push(trainer)
    after = document(stand.url)
    assert (after["committed"]["run"], after["committed"]["step"]) == (before["run"], before["step"] + 1)
    stand.serve()
    assert stand.condition("Ready")["reason"] != "Suspended"
