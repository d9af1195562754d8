"""`spec.state`: a fleet that takes no GPU for a while, and is the same fleet afterwards."""

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
    assert (after["committed"]["run"], after["committed"]["n"]) == (before["run"], before["n"] + 1)
    stand.serve()
    assert stand.condition("Ready")["reason"] != "Suspended"
