"""A user applies a rollout, pushes weights and gets answers from them."""

from __future__ import annotations

import json

import requests

from e2e.cases.actions import document, generate, push
from e2e.cases.conftest import ready
from e2e.kube import Kubectl, eventually


def test_status_and_columns_show_the_running_engines(kubectl: Kubectl, fleet: str, both_serve: None) -> None:
    # Engines may serve one probe period before the kubelet, and then the operator, knows that they are up.
    eventually("the rollout is Ready", lambda: ready(kubectl, fleet))
    rollout = kubectl.get("sglr", fleet)
    status = rollout["status"]
    assert (status["replicas"], status["readyReplicas"], status["updatedReplicas"]) == (2, 2, 2)
    assert status["endpoints"]["url"].startswith(f"http://{fleet}-router")
    header, row = kubectl("get", "sglr", fleet).strip().splitlines()
    for column in ("READY", "UP-TO-DATE", "VERSION", "AGE"):
        assert column in header
    assert "2/2" in row
    assert "kopf" not in json.dumps(rollout["metadata"]), "kopf writes nothing on the user's object"
    assert not rollout["metadata"].get("finalizers")


def test_url_generates_and_lists_the_serving_engines(url: str, both_serve: None) -> None:
    reply = generate(url)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["output_ids"]) == 8
    seen = document(url)
    assert seen["serving"] == 2
    assert seen["world_size"] == 3
    assert [member["rank_offset"] for member in seen["members"]] == [1, 2]


def test_push_reaches_every_engine_and_the_status(kubectl: Kubectl, fleet: str, url: str, both_serve: None) -> None:
    before = push(kubectl, fleet, "101", seed=1)
    after = push(kubectl, fleet, "102", seed=2)
    for name, answer in after["engines"].items():
        assert answer["version"] == "102"
        assert answer["ids"] != before["engines"][name]["ids"], "new weights, new tokens"
    assert len({tuple(answer["ids"]) for answer in after["engines"].values()}) == 1, "all engines hold the same weights"
    assert generate(url).json()["meta_info"]["weight_version"] == "102"
    eventually("status names the version", lambda: "102" in kubectl("get", "sglr", fleet))
    eventually("an Event names the version", lambda: "102" in kubectl("describe", "sglr", fleet).split("Events:")[1])


SCRAPE = (
    "import json, requests, sys\n"
    "for url in json.loads(sys.argv[1]):\n"
    "    reply = requests.get(url, timeout=30)\n"
    "    refused = requests.post(url.split('/metrics')[0] + '/generate', json={}, timeout=10).status_code\n"
    "    print(json.dumps([url, reply.status_code, reply.text, refused]))\n"
)
EXPORTED = {
    "engine": {"/metrics": "sglang:", "/metrics/agent": "sglang_rollout_agent_gate_open 1.0", "/metrics/gate": "haproxy_"},
    "router": {
        "/metrics": "sglang_rollout_coordinator_serving 2.0",
        "/metrics/batches": "sglang_rollout_batches_memory_bytes 0.0",
        "/metrics/smg": "smg_",
        "/metrics/front": "haproxy_",
    },
}
"""A part of the scraped text of each path, by component."""


def test_port_metrics_of_each_pod_has_the_metrics_of_its_processes(kubectl: Kubectl, fleet: str, client: str, both_serve: None) -> None:
    expected: dict[str, str] = {}
    for component, paths in EXPORTED.items():
        for pod in kubectl.list("pods", f"rollout.sglang.io/rollout={fleet},app.kubernetes.io/component={component}"):
            ports = [port for container in pod["spec"]["containers"] for port in container.get("ports", ())]
            (port,) = (port["containerPort"] for port in ports if port.get("name") == "metrics")
            expected |= {f"http://{pod['status']['podIP']}:{port}{path}": text for path, text in paths.items()}
    assert len(expected) == 10, "two engine pods and the router pod"
    rows = [json.loads(line) for line in kubectl.exec("client", "python", "-", json.dumps(list(expected)), stdin=SCRAPE).splitlines()]
    assert len(rows) == len(expected)
    for url, status, text, refused in rows:
        assert status == 200, (url, text)
        assert expected[url] in text, url
        assert refused in (404, 405), f"{url} serves more than metrics"


def test_engine_refuses_control_calls_without_the_token(kubectl: Kubectl, fleet: str, client: str) -> None:
    probe = (
        "import requests, sys\n"
        "for headers in ({}, {'Authorization': 'Bearer wrong'}):\n"
        "    r = requests.post(sys.argv[1] + '/pause_generation', json={}, headers=headers, timeout=10)\n"
        "    print(r.status_code)\n"
    )
    address = f"http://{fleet}-engine-0-0.{fleet}-engines:30000"
    assert kubectl.exec("client", "python", "-", address, stdin=probe).split() == ["401", "403"]


def test_url_answers_information_calls_like_one_server(url: str) -> None:
    info = requests.get(f"{url}/server_info", timeout=10).json()
    assert (info["tp_size"], info["dp_size"], info["num_gpus"]) == (1, 2, 2)
    assert requests.get(f"{url}/health", timeout=10).status_code == 200
    model = requests.get(f"{url}/model_info", timeout=10).json()
    assert model["weight_version"] == document(url)["committed"]["label"]
