"""The PodMonitors and scrape jobs in ``examples/monitoring`` find every process that the operator renders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render.engines import engine_statefulsets
from sglang_rollout.controller.render.router import router_deployment
from sglang_rollout.controller.render.store import store_objects
from sglang_rollout.wire import ports
from tests.support.paths import REPOSITORY
from tests.unit.controller.support.worlds import SETTINGS, cr

ROOT = REPOSITORY
MONITORS = {
    monitor["metadata"]["name"]: monitor["spec"]
    for monitor in yaml.safe_load_all((ROOT / "examples/monitoring/pod-monitors.yaml").read_text())
}

JOBS = yaml.safe_load((ROOT / "examples/monitoring/scrape-config.yaml").read_text())["scrape_configs"]


def template(component: str) -> dict[str, Any]:
    rollout = SGLangRollout.model_validate(cr(weights={"transport": "Staged", "staging": {"sizeLimit": "1Gi"}}))
    owner = {
        "router": router_deployment(rollout, SETTINGS),
        "engine": engine_statefulsets(rollout, SETTINGS)[0],
        "store": store_objects(rollout, SETTINGS)[-1],
    }[component]
    return dict(owner["spec"]["template"])


def named_ports(pod: dict[str, Any]) -> Iterator[str]:
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        yield from (port["name"] for port in container.get("ports", ()))


@pytest.mark.parametrize(
    ("component", "processes"),
    [
        ("engine", {ports.METRICS: "engine", ports.METRICS_AGENT: "agent", ports.METRICS_GATE: "gate"}),
        (
            "router",
            {ports.METRICS: "coordinator", ports.METRICS_SMG: "smg", ports.METRICS_FRONT: "front", ports.METRICS_BATCHES: "batches"},
        ),
        ("store", {ports.METRICS: "store"}),
    ],
)
def test_the_monitor_of_a_component_selects_its_pods_and_every_process(component: str, processes: dict[str, str]) -> None:
    made, monitor = template(component), MONITORS[f"sglang-rollout-{component}s"]
    assert monitor["selector"]["matchLabels"].items() <= made["metadata"]["labels"].items()
    names = list(named_ports(made["spec"]))
    assert len(names) == len(set(names)), "Prometheus takes every port of the name"
    endpoints = monitor["podMetricsEndpoints"]
    assert {endpoint["port"] for endpoint in endpoints} <= set(names)
    shown = {
        endpoint["path"]: next(rule["replacement"] for rule in endpoint["relabelings"] if rule.get("targetLabel") == "container")
        for endpoint in endpoints
    }
    assert shown == processes
    containers = {item["name"] for item in (*made["spec"].get("initContainers", ()), *made["spec"]["containers"])}
    assert set(processes.values()) == containers - {"package"}, "the init container of the weight store only copies files"
    for endpoint in endpoints:
        assert "rollout" in {rule["targetLabel"] for rule in endpoint["relabelings"]}, "the alerts name it"
    labels = made["metadata"]["labels"]
    kept = f"{labels['app.kubernetes.io/managed-by']};{labels['app.kubernetes.io/component']};metrics"
    jobs = {
        job["metrics_path"]: job["job_name"].removeprefix("sglang-rollout-") for job in JOBS if job["relabel_configs"][0]["regex"] == kept
    }
    assert jobs == processes


def test_the_namespace_of_a_rollout_is_not_replaced_by_that_of_the_operator() -> None:
    assert all(endpoint["honorLabels"] for endpoint in MONITORS["sglang-rollout-operator"]["podMetricsEndpoints"])
    assert [job["job_name"] for job in JOBS if job.get("honor_labels")] == ["sglang-rollout-operator"]
