"""The metrics ports, in front of real processes, serve the metrics of every process and nothing else."""

from __future__ import annotations

import http.client
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.contract.support.local_fleet import Urls

pytestmark = [pytest.mark.router, pytest.mark.engine, pytest.mark.timeout(420)]

SAMPLES = {
    "engine": "sglang:num_running_reqs",
    "agent": "sglang_rollout_agent_engine_up",
    "gate": "haproxy_frontend_http_requests_total",
    "coordinator": "sglang_rollout_coordinator_serving",
    "smg": "smg_http_requests_total",
    "front": "haproxy_frontend_http_requests_total",
    "batches": "sglang_rollout_batches_memory_bytes",
}
"""By process, a sample that a dashboard shows."""


def url_of(target: dict[str, Any]) -> str:
    return f"http://{target['targets'][0]}{target['labels']['__metrics_path__']}"


def test_every_process_of_every_pod_is_scraped(urls: Urls) -> None:
    body = {"input_ids": [11, 22, 33], "sampling_params": {"max_new_tokens": 1}}
    for at in (urls.fleet, *urls.engines):  # some of SGLang's and smg's metrics begin with the first request
        assert requests.post(f"{at}/generate", json=body, timeout=60).status_code == 200
    found = {}
    for target in urls.targets:
        reply = requests.get(url_of(target), timeout=30)
        names = {sample.name for family in text_string_to_metric_families(reply.text) for sample in family.samples}
        found[target["labels"]["pod"], target["labels"]["container"]] = (reply.status_code, SAMPLES[target["labels"]["container"]] in names)
    assert len(found) == 4 + 3 * len(urls.engines)
    assert set(found.values()) == {(200, True)}, found


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/metrics", 405),
        ("POST", "/generate", 405),
        ("POST", "/pause_generation", 405),
        ("GET", "/flush_cache", 404),
        ("GET", "/server_info", 404),
        ("GET", "/fleet", 404),
        ("GET", "/fleet/metrics", 404),
        ("GET", "/agent/engine", 404),
        ("GET", "/metrics/", 404),
        ("GET", "//metrics", 404),
        ("GET", "/metrics/../flush_cache", 404),
        ("GET", "/%6detrics", 404),
    ],
)
def test_the_port_serves_metrics_and_nothing_else(urls: Urls, method: str, path: str, status: int) -> None:
    for address in {target["targets"][0] for target in urls.targets}:
        connection = http.client.HTTPConnection(address, timeout=30)  # sends the path as it is
        connection.request(method, path)
        reply = connection.getresponse()
        assert (reply.status, reply.getheader("Content-Type")) == (status, "application/json"), address
        connection.close()
