"""Real engines load files of a shared volume: adapters that the spec lists, and a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import requests

from e2e.cases.actions import ask_engines, document, forward, generate, push, serving
from e2e.kube import ROOT, Kubectl, eventually
from e2e.machine_token import HEADERS
from e2e.stand_in import CKPT
from sglang_rollout.plugin.refusal import read_refusal

MODEL = "/models/tiny"
ADAPTER_MAKER = (ROOT / "operator/tests/contract/support/make_adapter.py").read_text()
CHECKPOINT = Path(__file__).with_name("checkpoint.py").read_text()


def set_adapters(kubectl: Kubectl, fleet: str, adapters: list[dict[str, str]]) -> None:
    patch = {"spec": {"engine": {"lora": {"adapters": adapters}}}}
    kubectl("patch", "sglr", fleet, "--type=merge", "-p", json.dumps(patch))


def loaded(kubectl: Kubectl, fleet: str) -> list[tuple[str, int, int]]:
    rows = kubectl.get("sglr", fleet)["status"].get("adapters", [])
    return [(row["name"], row["loaded"], row["wanted"]) for row in rows]


def engine_pods(kubectl: Kubectl, fleet: str) -> list[str]:
    pods = kubectl.list("pods", f"rollout.sglang.io/rollout={fleet},app.kubernetes.io/component=engine")
    return sorted(pod["metadata"]["uid"] for pod in pods)


def test_running_engines_load_the_adapters_of_the_spec(kubectl: Kubectl, fleet: str, url: str, both_serve: None) -> None:
    push(kubectl, fleet, "601", seed=601)
    pods = engine_pods(kubectl, fleet)
    path = f"{CKPT}/math-1"
    kubectl.exec("client", "python", "-", MODEL, path, "1", stdin=ADAPTER_MAKER)
    plain, adapted = forward(kubectl, MODEL, 601), forward(kubectl, MODEL, 601, path)
    assert plain != adapted
    set_adapters(kubectl, fleet, [{"name": "math", "path": path}])
    try:
        eventually("status shows the adapter on both engines", lambda: loaded(kubectl, fleet) == [("math", 2, 2)])
        answers = ask_engines(kubectl, url, lora_path="math")
        assert [answer["output_ids"] for answer in answers.values()] == [adapted] * 2
        assert generate(url, lora_path="math").json()["output_ids"] == adapted
        assert generate(url).json()["output_ids"] == plain, "requests that name no adapter are answered as before"
    finally:
        set_adapters(kubectl, fleet, [])
        eventually("no engine holds the adapter", lambda: loaded(kubectl, fleet) == [])
    refused = generate(url, lora_path="math")
    refusal = read_refusal(refused.json()["error"]["message"])
    assert (refused.status_code, refusal and refusal.code) == (400, "adapter_not_loaded")
    assert engine_pods(kubectl, fleet) == pods, "no engine was restarted for it"


def test_checkpoint_loaded_through_the_url_becomes_the_committed_version(kubectl: Kubectl, fleet: str, url: str, both_serve: None) -> None:
    before = document(url)["committed"]
    folder = f"{CKPT}/step-602"
    kubectl.exec("client", "python", "-", MODEL, "602", folder, stdin=CHECKPOINT)
    expected = forward(kubectl, MODEL, 602)
    assert generate(url).json()["output_ids"] != expected

    absent = requests.post(f"{url}/update_weights_from_disk", json={"model_path": f"{CKPT}/absent"}, headers=HEADERS, timeout=60)
    assert (absent.status_code, absent.json()["success"], f"{CKPT}/absent" in absent.json()["message"]) == (400, False, True)
    assert document(url)["committed"] == before, "no engine received the call"

    reply = requests.post(
        f"{url}/update_weights_from_disk", json={"model_path": folder, "weight_version": "602"}, headers=HEADERS, timeout=120
    )
    assert (reply.status_code, reply.json()["success"]) == (200, True), reply.text
    seen = serving(url, 2)
    assert (seen["committed"]["label"], seen["last_update"]["outcome"]) == ("602", "Committed")
    assert seen["committed"]["step"] == before["step"] + 1
    answers = ask_engines(kubectl, url)
    assert [(answer["output_ids"], answer["meta_info"]["weight_version"]) for answer in answers.values()] == [(expected, "602")] * 2
    assert generate(url).json()["output_ids"] == expected

    def is_named() -> bool:
        weights = kubectl.get("sglr", fleet)["status"]["weights"]
        newest = (weights.get("recentUpdates") or [{}])[0]
        return (weights["committedVersion"], weights.get("author"), newest.get("version")) == ("602", "token", "602")

    eventually("status names the version and its author", is_named)
    push(kubectl, fleet, "603", seed=603)  # engines of later cases must not load this case's folder
