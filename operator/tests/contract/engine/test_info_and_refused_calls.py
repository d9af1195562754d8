"""Contract of an engine: information calls, and answers to wrong calls."""

from __future__ import annotations

import time

import pytest
import requests
from e2e.engine import environment
from prometheus_client.parser import text_string_to_metric_families

from tests.contract.support.engine_servers import Server, refused

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]


@pytest.fixture
def fresh(engine: Server) -> Server:
    """Return a server with its initial weights."""
    if engine.label() != "base":
        engine.restart()
    return engine


def test_model_info(fresh: Server) -> None:
    status, info = fresh.get("/model_info")
    assert status == 200
    assert {
        "model_path": str(environment.model()), "served_model_name": str(environment.model()), "tokenizer_path": str(environment.model()),
        "is_generation": True, "preferred_sampling_params": None, "weight_version": "base", "load_format": "auto", "reasoning_parser": None,
        "tool_call_parser": None, "disaggregation_mode": "null", "has_image_understanding": False, "has_audio_understanding": False,
        "model_type": "llama", "architectures": ["LlamaForCausalLM"],
    }.items() <= info.items()  # fmt: skip
    assert fresh.get("/get_model_info") == (200, info)


def test_server_info(engine: Server) -> None:
    status, info = engine.get("/server_info")
    assert status == 200
    assert {
        "version": "0.5.23", "frontend": "python", "tp_size": 1, "pp_size": 1, "dp_size": 1, "attn_dp_size": 1, "ep_size": 1, "nnodes": 1,
        "node_rank": 0, "port": engine.engine.port, "host": "127.0.0.1", "weight_version": "base", "context_length": 2048,
        "nccl_port": None, "device": "cpu", "dtype": "float32", "api_key": None, "admin_api_key": None, "enable_memory_saver": False,
        "max_running_requests": 16, "max_total_num_tokens": 16384, "max_req_input_len": 2042, "served_model_name": str(environment.model()),
    }.items() <= info.items()  # fmt: skip
    assert isinstance(info["random_seed"], int)
    assert isinstance(info["startup_time"]["tokenizer_e2e"], float)
    assert f"--port {engine.engine.port}" in info["launch_command"]
    assert info["internal_states"][0]["world_size"] == 1
    assert info["internal_states"][0]["effective_max_running_requests_per_dp"] == 16
    again = engine.get("/get_server_info")[1]
    assert {key: again[key] for key in ("random_seed", "startup_time", "launch_command")} == {
        key: info[key] for key in ("random_seed", "startup_time", "launch_command")
    }


def test_metrics(engine: Server) -> None:
    engine.generate(2)
    text = engine.get("/metrics")[1]
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    for name in ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:generation_tokens_total"):
        assert {sample.labels["model_name"] for sample in samples if sample.name == name} == {str(environment.model())}
    assert sum(sample.value for sample in samples if sample.name == "sglang:generation_tokens_total") >= 2


def test_models_and_loads(engine: Server) -> None:
    status, models = engine.get("/v1/models")
    (row,) = models.pop("data")
    assert (status, models) == (200, {"object": "list"})
    assert isinstance(row.pop("created"), int)
    name = str(environment.model())
    assert row == {"id": name, "object": "model", "owned_by": "sglang", "root": name, "parent": None, "max_model_len": 2048}
    status, loads = engine.get("/v1/loads")
    assert (status, loads["version"], loads["num_accelerators"], len(loads["loads"])) == (200, "0.5.23", 1, 1)
    row = loads["loads"][0]
    assert {
        "dp_rank": 0,
        "num_running_reqs": 0,
        "num_waiting_reqs": 0,
        "max_total_num_tokens": 16384,
        "max_running_requests": 16,
    }.items() <= row.items()
    assert {"num_used_tokens", "num_total_tokens", "token_usage", "gen_throughput", "cache_hit_rate", "utilization"} <= set(row)


def test_health(engine: Server) -> None:
    for path in ("/health", "/ready", "/ping"):
        assert engine.get(path) == (200, ""), path
    began = time.monotonic()
    assert engine.get("/health_generate") == (200, "")
    assert time.monotonic() - began >= 1


def test_unknown_paths_and_wrong_methods(engine: Server) -> None:
    missing, wrong = {"detail": "Not Found"}, {"detail": "Method Not Allowed"}
    assert engine.get("/get_load") == (404, missing)
    assert engine.post("/nosuch", {}) == (404, missing)
    assert engine.get("/generate") == (405, wrong)
    assert engine.get("/begin_weight_update") == (405, wrong)


@pytest.mark.parametrize("path", ["/begin_weight_update", "/continue_generation", "/generate", "/abort_request", "/pause_generation"])
def test_call_without_a_body_is_refused(engine: Server, path: str) -> None:
    refused(engine.post(path), "'missing'", "body")
    reply = requests.post(engine.url + path, data="no", headers={"Content-Type": "application/json"}, timeout=30)
    refused((reply.status_code, reply.json()))
